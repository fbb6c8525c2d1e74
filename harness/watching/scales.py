"""By what a loss is a mean, as far as its graph tells."""

from typing import Any

import torch

#: The nodes of losses that are means by an argument, and the number that stands for it.
_OF_LOSSES = (
    "NllLoss", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits",
    "SoftMarginLoss", "CrossEntropyLoss",
)  # fmt: skip
_MEAN = 1

#: The nodes that pass on what they are given, or the sum of it.
_PASSES = ("ToCopy", "Add", "View", "Squeeze")

#: How deep a graph is read.
_DEPTH = 12


def factor_of_mean(loss: torch.Tensor) -> float | None:
    """Return the factor by which a loss is a mean over what it is computed from; None where that is not known."""
    try:
        return _factor(loss.grad_fn, _DEPTH)
    except (RuntimeError, AttributeError):  # nodes are asked for what another version of torch may not keep
        return None


def kind_of_graph(loss: torch.Tensor) -> str:
    """Return the kinds of the nodes next to a loss, but for those that scale it."""
    found, node = [], loss.grad_fn
    for _ in range(_DEPTH):
        if node is None:
            break
        if (kind := type(node).__name__.partition("Backward")[0]) not in ("Mul", "Div"):
            found.append(kind)
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return " ".join(found)


def _factor(node: Any, depth: int) -> float | None:
    kind = type(node).__name__.partition("Backward")[0]
    if node is None or not depth:
        return None
    if kind == "Mean":
        return 1.0
    if kind.startswith(_OF_LOSSES):
        return 1.0 if getattr(node, "_saved_reduction", None) == _MEAN else None
    children = [one for one, _ in node.next_functions if one is not None]
    if kind in ("Mul", "Div") and len(children) == 1:
        return _scaled(kind, getattr(node, "_saved_other", None), _factor(children[0], depth - 1))
    found = {_factor(one, depth - 1) for one in children} if kind in _PASSES else set()
    return found.pop() if len(found) == 1 else None


def _scaled(kind: str, by: Any, factor: float | None) -> float | None:
    """Return a factor that is multiplied or divided by a number of the host."""
    if factor is None or not isinstance(by, torch.Tensor) or by.numel() != 1 or by.device.type != "cpu":
        return None
    return factor * float(by) if kind == "Mul" else factor / float(by)
