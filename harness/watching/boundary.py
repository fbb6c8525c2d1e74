"""Outputs and inputs of roots, which stages of a pipeline send to each other, and their gradients.

A hash of each is kept, and a digest of the gradient that autograd has for it; both are computed on their devices and
read when the step has ended. Hooks are those of nodes of the graph, and go with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardproof.harness.tensors.fingerprints import Digest, digest, host_rows, on_host, position_hash
from shardproof.harness.watching.hooks import quiet
from shardproof.harness.watching.names import untransformed
from shardproof.harness.watching.records import Crossed

#: Tensors of more elements are read only where a loop has been seen to pass gradients between backward passes.
_MOST_ELEMENTS = 1 << 18

#: How many tensors of a step are read.
_MOST = 256


@dataclasses.dataclass
class _Side:
    """An input or an output of a root, with the digests of its gradients."""

    is_output: bool
    bits: torch.Tensor
    gradients: list[Digest] = dataclasses.field(default_factory=list)


class Boundary:
    """The boundary of this process, for all roots of a loop.

    Attributes:
        is_crossed: whether a root was given an input that requires a gradient, or a backward pass began with one.
    """

    def __init__(self) -> None:
        self.is_crossed = False
        self._sides: list[_Side] = []
        #: Nodes of inputs, which nothing else keeps until the forward has used these.
        self._nodes: list[Any] = []

    @quiet
    def take_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the inputs of a forward that require gradients."""
        self._nodes.clear()
        for one in tensors:
            if type(one) is torch.Tensor and one.requires_grad:
                self.is_crossed = True
                self._take(one, is_output=False)

    @quiet
    def take_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the outputs of a forward, but numbers such as a loss."""
        self._nodes.clear()
        for one in tensors:
            if one.requires_grad and one.grad_fn is not None and one.numel() > 1:
                self._take(one, is_output=True)

    def begin_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a backward pass begins on these tensors."""
        self.is_crossed = self.is_crossed or any(isinstance(one, torch.Tensor) and one.numel() > 1 for one in tensors)

    @torch.no_grad()
    def _take(self, tensor: torch.Tensor, *, is_output: bool) -> None:
        is_plain = type(tensor) is torch.Tensor and untransformed(tensor) is tensor and tensor.is_floating_point()
        is_small = self.is_crossed or tensor.numel() <= _MOST_ELEMENTS
        if not (is_plain and is_small) or len(self._sides) >= _MOST:
            return
        side = _Side(is_output, position_hash(tensor.detach()))
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        edge.node.register_prehook(_taking(side.gradients, edge.output_nr))
        self._sides.append(side)
        if not is_output:
            self._nodes.append(edge.node)

    def take(self) -> list[Crossed]:
        """Return what was seen since the last call."""
        sides, self._sides = self._sides, []
        self._nodes.clear()
        bits = host_rows([one.bits for one in sides])
        marks = iter(on_host([one for side in sides for one in side.gradients]))
        return [
            Crossed(side.is_output, own, tuple(next(marks) for _ in side.gradients))
            for side, own in zip(sides, bits, strict=True)
        ]


def _taking(gradients: list[Digest], number: int) -> Callable[[Any], None]:
    """Return a hook of a node that takes the gradient of one of its outputs."""

    def hook(entering: Any) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            if (gradient := entering[number]) is not None and type(gradient) is torch.Tensor:
                gradients.append(digest(gradient))

    disabled: Callable[[Any], None] = torch.compiler.disable(hook)
    return disabled
