"""Looks again at a training after its watched steps: counts steps, and reads states at a few of them.

Between looks nothing is done but to count. A look is the part of a watched step that reads states where an optimizer's
step begins: bits of parameters, optimizer states and buffers, gradients as the step finds them, and what stands
besides. Hooks in backward are none of it, and of hooks in forward those alone that read which batch a root is given.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardproof.harness.judging.finding import Stage
from shardproof.harness.watching import calls
from shardproof.harness.watching.gathered import Gathered
from shardproof.harness.watching.hooks import guarded
from shardproof.harness.watching.inputs import StepInputs
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.observation import Takes
from shardproof.harness.watching.optimizers import STEPS, parameters_in
from shardproof.harness.watching.records import StepRecord
from shardproof.harness.watching.step import Forwards, WatchedStep
from shardproof.harness.watching.successors import Successors
from shardproof.harness.watching.updates import Nesting, closure_of, with_closure


class Rounds:
    """Counts steps by the optimizers that step the parameters of a model.

    Args:
        model: whose parameters they are.
        only: those whose steps count; empty for each that steps.
        in_turn: whether each optimizer's step is one by itself; else those of several optimizers are one until one of
            them steps again.
        successors: finds the model that replaces it; None where none may.
    """

    def __init__(
        self, model: Model, only: Sequence[torch.optim.Optimizer], *, in_turn: bool, successors: Successors | None
    ) -> None:
        self._model, self._nesting, self._in_turn = model, Nesting(only), in_turn
        self._successors = successors
        self._round: set[int] = set()
        #: By id the optimizers that have stepped, how many groups each had, and whether it has parameters of the model.
        self._known: dict[int, tuple[weakref.ref[Any], int, bool]] = {}

    def begin(self, optimizer: torch.optim.Optimizer) -> bool:
        """Begin the step of an optimizer; whether it begins a step of the model, is returned."""
        if not self._nesting.counts(optimizer):
            return False
        is_inner, is_of_model = self._nesting.begin(optimizer, 0), self._is_of_model(optimizer)
        if is_inner or not is_of_model:
            return False
        is_new = self._in_turn or not self._round or id(optimizer) in self._round
        self._round = {id(optimizer)} if is_new else self._round | {id(optimizer)}
        return is_new

    def watched(self, closure: Callable[..., Any], on_end: Callable[[], None]) -> Callable[..., Any]:
        """Return a closure in its place, which tells when it has been called."""
        return self._nesting.watched(closure, on_end)

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        """End the step of an optimizer; whether it was the outermost, is returned."""
        return self._nesting.end(optimizer)[0] is not None and not self._nesting

    def optimizers(self, model: Model) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have stepped and have parameters of a model, in the order of their first steps."""
        live = {id(one) for _, one in model.parameters()}
        found = (ref() for ref, _, _ in self._known.values())
        return [one for one in found if one is not None and any(id(each) in live for each in parameters_in(one))]

    @property
    def model(self) -> int:
        """How many models have replaced the first."""
        return 0 if self._successors is None else self._successors.count

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        ref, groups, is_of = self._known.get(id(optimizer), (lambda: None, -1, False))
        if ref() is not optimizer or groups != len(optimizer.param_groups):
            live = {id(one) for _, one in self._model.parameters()}
            is_of = any(id(one) in live for one in parameters_in(optimizer))
            if not is_of and self._successors is not None and self._successors.take(optimizer):
                self._known.clear()
                is_of = True
            self._known[id(optimizer)] = weakref.ref(optimizer), len(optimizer.param_groups), is_of
        return is_of


class Looks(contextlib.AbstractContextManager["Looks"]):
    """Looks at models after steps at doubling distances, while it is entered.

    Args:
        models: of all roots; the first one's steps count.
        rounds: counts them.
        begin: the number of the first step that is counted.
        on_look: is called with the records of the models, in their order, when the optimizer of such a step has ended.
        on_destroy: is called before all process groups are destroyed.
        on_error: takes an error of ours in a hook; nothing of it reaches the training.
        passes: exceptions of ``on_look`` that do.

    Attributes:
        step: the number of the current step, or of the next one where none has begun since the last.
    """

    def __init__(
        self, models: Sequence[Model], rounds: Rounds, begin: int, *, on_look: Callable[[list[StepRecord]], None],
        on_destroy: Callable[[], None], on_error: Callable[[Exception], None], passes: tuple[type[Exception], ...],
    ) -> None:  # fmt: skip
        self._models, self._rounds = list(models), rounds
        self.step, self._last, self._distance = begin - 1, begin - 1, 2
        self._on_look, self._on_destroy = on_look, on_destroy
        self._on_error, self._passes = on_error, passes
        self._taken: list[WatchedStep] = []
        self._inputs = StepInputs(on_error)
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Looks:
        self._patches.callback(STEPS.add(self._before_optimizer, self._after_optimizer).remove)
        self._patches.enter_context(calls.ends(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self._inputs.end()
        self._taken = []

    @property
    def has_more(self) -> bool:
        """Whether steps were counted since the last look."""
        return self.step > self._last

    def look(self) -> list[StepRecord]:
        """Look now, after the last step."""
        self.step += 1
        self._taken = []
        self._read_all()
        return self._records()

    @guarded
    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._rounds.begin(optimizer):
            return None
        self.step, self._taken = self.step + 1, []
        if self.step != self._last + self._distance:
            return None
        self._distance *= 2
        if callable(closure := closure_of(args, kwargs)):  # gradients of the step are there when it has ended
            return with_closure(args, kwargs, self._rounds.watched(closure, self._read_all))
        self._read_all()
        return None

    @guarded
    def _read_all(self) -> None:
        inputs = self._inputs.end()
        self._taken = self._taken or [self._read(one, inputs.get(id(one))) for one in self._models]

    @guarded
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._rounds.end(optimizer):
            return
        if self._taken:
            self._on_look(self._records())
        if self.step + 1 == self._last + self._distance:
            self._inputs.begin(self._models)

    @guarded
    def on_destroy(self) -> None:
        self._on_destroy()

    @torch.no_grad()
    def _read(self, model: Model, inputs: Forwards | None) -> WatchedStep:
        """Read a model on its devices, with what it was given in the step."""
        seen = WatchedStep(model, Takes(), [])
        seen.forwards = inputs or seen.forwards
        seen.updates.at_step = seen.gradients(Stage.CLIPPED_GRADIENT)
        seen.updates.look(self._rounds.optimizers(model))
        return seen

    @torch.no_grad()
    def _records(self) -> list[StepRecord]:
        taken, self._taken, self._last = self._taken, [], self.step
        records = [one.record(self.step, Gathered()) for one in taken]
        for one in records:
            one.modules.standing.model = self._rounds.model
        return records
