"""Elements of narrow parameters, of which an optimizer's step may change none: a small update is lost to rounding."""

import torch
from torch import nn

from shardproof.harness.tensors.fingerprints import host_rows, strided
from shardproof.harness.tensors.trees import local_of

#: The dtypes in which an update is easily less than half of the spacing of a parameter's values.
NARROW = (torch.bfloat16, torch.float16)

#: How many elements of a parameter are kept over a step.
_ELEMENTS = 4096


def is_narrow(tensor: torch.Tensor) -> bool:
    """Whether the dtype of a tensor is narrower than float32, and of so few bits that small updates are easily lost."""
    return tensor.dtype in NARROW


class Samples:
    """A few elements of each narrow parameter before a step, and how many of them the step changes."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._counts: dict[str, torch.Tensor] = {}

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Keep some elements of a parameter, with whether they have a gradient."""
        if not is_narrow(parameter) or parameter.grad is None:
            return
        own, gradient = _sample(parameter), _sample(parameter.grad)
        if own is not None and gradient is not None and own.shape == gradient.shape:
            self._before[name] = own.clone(), gradient != 0

    def compare(self, name: str, parameter: nn.Parameter) -> None:
        """Count the elements with a gradient that are as before, and all that have one."""
        before, has_gradient = self._before.pop(name, (None, None))
        now = _sample(parameter)
        if before is not None and has_gradient is not None and now is not None and now.shape == before.shape:
            self._counts[name] = torch.stack([(has_gradient & (now == before)).sum(), has_gradient.sum()])

    def counts(self) -> dict[str, tuple[int, int]]:
        """Copy the counts to the host, by the name of the parameter."""
        rows = host_rows([*self._counts.values()])
        return {name: (kept, count) for name, (kept, count) in zip(self._counts, rows, strict=True)}


def some_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of some elements of what a rank holds; None without any, or where they are not in one row."""
    own = strided(local_of(tensor.detach()))
    if own.numel() == 0 or not own.is_contiguous():
        return None
    return own.view(-1)[:: max(1, own.numel() // _ELEMENTS)]


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the same of what a narrow tensor has."""
    own = some_of(tensor)
    return own if own is not None and is_narrow(own) else None
