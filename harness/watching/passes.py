"""Counts the backward passes between steps of an optimizer, in the whole training, and reads by what each scales."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.optimizers import parameters_in
from shardproof.harness.watching.records import Windows
from shardproof.harness.watching.scales import factor_of_mean, kind_of_graph

#: With more changes of the number of passes than so many, it is no plan.
_MOST = 16


def writes(tensor: torch.Tensor) -> int:
    """Return how often what a rank holds of a tensor was written in place, by it or by another that shares it."""
    return tensor._version + local_of(tensor)._version  # a DTensor counts what is written through it


class _Gradient:
    """A gradient of the optimizer's, by which it is seen whether something writes gradients.

    Attributes:
        is_as_computed: whether backward passes and clipping alone have written it since it was there.
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[torch.Tensor] | None = None
        self._mark: tuple[int, int] | None = None
        self.is_as_computed = False

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter whose gradient it is."""
        return None if self._parameter is None else self._parameter()

    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the first parameter of an optimizer that has a gradient, unless there is one."""
        if self.parameter is None:
            found = next((one for one in parameters_in(optimizer) if one.grad is not None), None)
            self._parameter = None if found is None else weakref.ref(found)

    def mark(self) -> None:
        """Note what it is, when a backward pass or clipping has written it."""
        self._mark = self._now()

    def compare(self) -> None:
        """Note whether something has written it since the mark."""
        self.is_as_computed = self.is_as_computed and self._mark is not None and self._mark == self._now()

    def is_gone(self) -> bool:
        """Whether it was there at the mark, and is not."""
        return self._mark is not None and self._now() is None

    def _now(self) -> tuple[int, int] | None:
        gradient = None if (own := self.parameter) is None else own.grad
        return None if gradient is None else (id(gradient), writes(gradient))


class Passes:
    """The backward passes of the only optimizer that steps, or of the first of several in each step."""

    def __init__(self) -> None:
        self._optimizer: weakref.ref[Any] | None = None
        self._gradient = _Gradient()
        self._now: list[tuple[float | None, str]] = []
        self._windows: list[Windows] = []
        self._is_in_step = self._is_irregular = False

    def begin(self, losses: Sequence[torch.Tensor]) -> None:
        """Begin a backward pass."""
        if self._is_irregular:
            return
        self._is_irregular |= self._is_in_step  # of a closure
        own = self._gradient.parameter
        if own is not None and not own.requires_grad:
            return
        if self._gradient.is_gone():
            self.drop()
        is_one = len(losses) == 1
        self._now.append((factor_of_mean(losses[0]), kind_of_graph(losses[0])) if is_one else (None, ""))

    def end(self) -> None:
        """Note what gradients are when a pass has ended."""
        if not self._is_irregular:
            self._gradient.mark()
            self._gradient.is_as_computed = True

    def drop(self) -> None:
        """Forget the passes whose gradients are zeroed."""
        self._now = []

    def before_clip(self) -> None:
        """Note whether something has written gradients before they are clipped."""
        if not self._is_irregular:
            self._gradient.compare()

    def after_clip(self) -> None:
        """Note what gradients are when they were clipped."""
        if not self._is_irregular:
            self._gradient.mark()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the passes of a step."""
        if self._is_irregular:
            return
        self._is_in_step, passes, self._now = True, self._now, []
        if not passes:  # it steps after another one, by gradients of the same passes
            return
        known, self._optimizer = self._optimizer, weakref.ref(optimizer)
        if known is not None and known() is not optimizer:
            self._is_irregular = True
            return
        self._gradient.compare()
        if known is None:
            self._gradient.find(optimizer)
        else:
            self._add(passes, is_as_computed=self._gradient.is_as_computed)

    def after_step(self) -> None:
        """Note that the step has ended."""
        self._is_in_step = False

    def _add(self, passes: Sequence[tuple[float | None, str]], *, is_as_computed: bool) -> None:
        factor, kind = passes[0] if len(set(passes)) == 1 else (None, "")
        new = Windows(len(passes), factor, kind, is_as_computed, 1)
        last = self._windows[-1] if self._windows else None
        if last is not None and dataclasses.replace(last, steps=1) == new:
            self._windows[-1] = dataclasses.replace(last, steps=last.steps + 1)
            return
        self._windows.append(new)
        self._is_irregular = len(self._windows) > _MOST

    def take(self) -> list[Windows]:
        """Return the steps by now; none where they are irregular."""
        return [] if self._is_irregular else list(self._windows)
