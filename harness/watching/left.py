"""Gradients that backward passes have left, and that are gone before an optimizer steps by them.

A loop clears them for one of many reasons: it skips a step, it trains two models, it evaluates a closure again, or it
loses microbatches. Whether they are gone is asked when a forward or a backward begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardproof.harness.tensors.fingerprints import host_rows, strided
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.pending import Pending, few_values, last_number
from shardproof.harness.watching.records import Drop


class StepCounts(NamedTuple):
    """How much of a step was seen: outputs and gradients that must be finite, norms, and losses with tokens."""

    finite: int = 0
    norms: int = 0
    tokens: int = 0


@dataclasses.dataclass
class _Beginning:
    """A forward or a backward that has begun, with what is there of the gradients of earlier backward passes.

    Attributes:
        drop: what it is, if they are gone.
        seen: what was seen by then.
        left: of each gradient, whether an element is not zero; on its device.
        after: of each after the last backward, the sum of the squares; on its device.
        values: of the parameters.
    """

    drop: Drop
    seen: StepCounts
    left: Sequence[torch.Tensor]
    after: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    @property
    def are_gone(self) -> bool:
        """Whether no gradient is left; where they are on an accelerator, the host waits for it."""
        # They may have been zero before.
        return not any(host_rows(self.left)) and (not self.left or any(host_rows(self.after)))


class Left:
    """What backward passes of a step have left in ``.grad``.

    Where each gradient is None it is known at once that nothing is left. Of others it is computed where they are, and
    read when the step has ended: before that only where they are on the host, or where user code is seen to clear or
    write them, because a rank that goes on alone without a step must be found before the others wait for it.
    """

    def __init__(self) -> None:
        self._values: Sequence[torch.Tensor] = ()
        self._versions = self._gone = 0
        self._begun: list[_Beginning] = []
        self._is_known = True

    def end_backward(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Note what a backward pass has left."""
        self._versions = _versions(one for _, one in parameters)

    def begin(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        drop: Drop,
        seen: StepCounts,
        *,
        after: Collection[Pending],
        is_cleared: bool,
    ) -> None:
        """Begin a forward or a backward.

        Args:
            drop: what it is, if the gradients of earlier backward passes are gone.
            seen: how much of the step was seen.
            after: those gradients, as they were after the last backward; none before the first.
            is_cleared: whether user code was seen to clear them.
        """
        mine = list(parameters)
        if after or not self._values:
            values = few_values(mine)
            self._values = self._values or values
        if not after:
            return
        gradients = [local_of(one.grad) for _, one in mine if one.grad is not None]
        left = [strided(one).any() for one in gradients]
        self._begun.append(_Beginning(drop, seen, left, [last_number(one) for one in after], values))
        is_there = all(is_on_host(one) for one in left)
        self._is_known = is_there or is_cleared or self._versions != _versions(one for _, one in mine)

    def gone(self, *, is_last: bool) -> Iterator[tuple[Drop, StepCounts]]:
        """Yield what is gone, each with how much was seen by then.

        Args:
            is_last: whether the step has ended, so that all that was computed is read.
        """
        while self._begun and (is_last or self._is_known):
            one = self._begun.pop(0)
            # Between a forward and its backward nothing more is gone.
            if one.drop.backwards == self._gone or not one.are_gone:
                continue
            # Parameters may come and go, as those that are frozen.
            has_moved = len(one.values) != len(self._values) or not all(map(torch.equal, one.values, self._values))
            self._values, self._gone = one.values, one.drop.backwards
            yield dataclasses.replace(one.drop, is_meant=one.drop.is_meant or has_moved), one.seen


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host reads a tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def _versions(parameters: Iterable[nn.Parameter]) -> int:
    """Return a number that changes when user code writes gradients, as far as torch counts writes."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    return sum(each._version for one in gradients for each in (one, local_of(one)) if not each.is_inference())
