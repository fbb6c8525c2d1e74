"""What a watch sees of one step, part by part: each is made when the step begins, and ends with it.

Values stay on their devices until the step has ended; then each part makes its own part of the record.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardproof.harness.collectives.trace import Trace
from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors import fingerprints
from shardproof.harness.tensors.fingerprints import host_rows, on_host
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.gathered import Gathered
from shardproof.harness.watching.labels import Compared, Tokens, columns_of, rows_of, varies
from shardproof.harness.watching.left import Left, StepCounts
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.names import name_of, number_of, readable_of
from shardproof.harness.watching.observation import Takes
from shardproof.harness.watching.optimizers import parameters_in
from shardproof.harness.watching.pending import OwnGradients, Pending, digest, last_number, ordered
from shardproof.harness.watching.recomputing import Draws
from shardproof.harness.watching.records import (
    Argument,
    Drop,
    ForwardRecord,
    Gradient,
    GradientRecord,
    Inputs,
    LossRecord,
    ModuleRecord,
    NormCall,
    NormRecord,
    NotFinite,
    StepRecord,
    Usage,
)
from shardproof.harness.watching.scales import factor_of_mean
from shardproof.harness.watching.updates import Updates

#: Tensors with a NaN that a record lists; the first is what matters.
_MOST_NOT_FINITE = 8

#: Of how many forwards of a step columns of inputs are read.
_MOST_OF_COLUMNS = 8


class _Batch(NamedTuple):
    """The inputs of a forward.

    Attributes:
        hashes: what stands for each tensor among them, and whether it varies, in turns; on its device.
        kinds: the dtype and the shape of each.
        parts: what stands for the rows of each; on its device.
        columns: the same of its columns.
        rows: the size of the first dimension of the first.
        backwards: how many backward passes there were before.
        asks: whether user code asks for the gradient of one of them.
    """

    hashes: list[torch.Tensor]
    kinds: list[str]
    parts: list[torch.Tensor]
    columns: list[torch.Tensor]
    rows: int
    backwards: int
    asks: bool


class Forwards:
    """The forwards of roots with gradients enabled.

    Attributes:
        count: how many have begun.
        wants_batch: whether the last has no tensor among its arguments, so that its first module's count.
        called: by module that was called, whether it was with gradients enabled.
        off: for each, the calls that keep its backward from reducing gradients.
        autocast: the dtype of autocast.
        tokens: the integer inputs of the last.
    """

    def __init__(self) -> None:
        self.count = 0
        self.tokens = Tokens()
        self.wants_batch = False
        self.called: dict[int, bool] = {}
        self.off: list[tuple[str, ...]] = []
        self.autocast = ""
        self._calls: collections.Counter[str] = collections.Counter()
        self._batches: list[_Batch] = []
        self._divided: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Begin the forward of a root."""
        self.count += 1
        self._calls.clear()

    def call_of(self, name: str) -> int:
        """Return the number of a module's call within the forward."""
        self._calls[name] += 1
        return self._calls[name] - 1

    def take_batch(self, inputs: Any, backwards: int) -> list[torch.Tensor]:
        """Take the inputs of a forward, and return the tensors among them.

        Args:
            backwards: how many backward passes there were before.
        """
        found = list(readable_of(inputs))
        self.wants_batch = not found
        if found:
            hashes = [one for tensor in found for one in (_hash(tensor), varies(tensor).long())]
            kinds = [f"{name_of(tensor.dtype)} {list(tensor.shape)}" for tensor in found]
            self.tokens.take(found)
            rows = found[0].size(0) if found[0].ndim else 0
            parts = [rows_of(tensor, rows) for tensor in found]
            columns = [columns_of(tensor, rows) for tensor in (found if len(self._batches) < _MOST_OF_COLUMNS else ())]
            asks = any(tensor.requires_grad for tensor in found)
            self._batches.append(_Batch(hashes, kinds, parts, columns, rows, backwards, asks))
        return found

    def take_divided(self, inputs: Any) -> None:
        """Take the first DTensor that a module of the forward is given, by which ranks compute parts of one model."""
        if len(self._divided) >= self.count:
            return
        if (first := next((one for one in readable_of(inputs) if isinstance(one, DTensor)), None)) is not None:
            is_copy = all(placement.is_replicate() for placement in first.placements)
            self._divided.append(fingerprints.position_hash(local_of(first.detach())) if is_copy else None)

    def are_of_input(self, backwards: int) -> bool:
        """Whether user code asks for the gradient of an input of those before a backward pass."""
        return any(one.asks for one in self._batches if one.backwards < backwards)

    def record(self) -> ForwardRecord:
        """Return what a record has of them."""
        hashes = iter(host_rows([one for batch in self._batches for one in batch.hashes]))
        inputs = []
        for one in self._batches:
            columns = [tuple(own.tolist()) for own in one.columns] or [()] * len(one.kinds)
            tensors = tuple(
                Argument(next(hashes), kind, varies := bool(next(hashes)), tuple(rows.tolist()) if varies else (), own)
                for kind, rows, own in zip(one.kinds, one.parts, columns, strict=True)
            )
            batch = sum((number + 1) * each.bits for number, each in enumerate(tensors))
            inputs.append(Inputs(batch, one.rows, one.backwards, tensors))
        of_parts = iter(host_rows([one for one in self._divided if one is not None]))
        divided = [None if one is None else next(of_parts) for one in self._divided]
        return ForwardRecord(self.count, inputs, divided, self.off, self.autocast)


class Backwards:
    """The backward passes, and what they give.

    Attributes:
        count: how many have ended.
        is_running: whether one has begun.
        is_ending: whether the callback runs once more that ends it.
        own: the gradients of this rank alone.
        after: those in ``.grad`` after the last.
        unplaced: parameters with a gradient of which nobody knows where its elements belong.
        has_steps: whether an optimizer has stepped in the middle of one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_running = self.is_ending = self.has_steps = False
        self.own = OwnGradients()
        self.after: dict[str, Pending] = {}
        self.unplaced: set[str] = set()


class Finite:
    """Tensors that must be finite: outputs of modules, and gradients before their reduction."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, torch.Tensor | Pending]] = []
        self._output: tuple[Callable[[], torch.Tensor | None], int] = (lambda: None, 0)

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, what: str, gradient: Pending) -> None:
        """Add a gradient."""
        self._seen.append((what, gradient))

    def add_output(self, what: str, tensor: torch.Tensor) -> None:
        """Add an output, once: what a container returns is what its last module has returned."""
        if not tensor.is_floating_point() or not tensor.numel():
            return
        last, version = self._output
        if last() is tensor and version == tensor._version:
            return
        self._output = weakref.ref(tensor), tensor._version
        self._seen += [(what, one) for one in torch.aminmax(ordered(tensor))]

    def read(self, dropped: int) -> tuple[list[NotFinite], bool]:
        """Return which are not, without those of the first ``dropped``, and whether one of these is not."""
        values = host_rows([last_number(one) for _, one in self._seen])
        is_wrong = [not math.isfinite(value) for value in values]
        found = [what for (what, _), bad in zip(self._seen, is_wrong, strict=True) if bad]
        wrong = list(dict.fromkeys(found[sum(is_wrong[:dropped]) :]))[:_MOST_NOT_FINITE]
        return [NotFinite(order, what) for order, what in enumerate(wrong)], any(is_wrong[:dropped])


class Norms:
    """The total norms that were computed, and those that gradients were clipped by.

    Attributes:
        clipped_scaled: whether gradients were clipped before a loss scaler unscaled them.
    """

    def __init__(self) -> None:
        self.clipped_scaled = False
        self._calls: list[tuple[str, Any, float | None, float]] = []
        self._last: Any = None
        self._computed = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, function: str, value: Any, max_norm: float | None, norm_type: float) -> int | None:
        """Add a call; returns the number of its norm, or None where it is the last one again, to clip by."""
        is_new = value is not self._last
        self._last = value
        self._computed += is_new
        value = value.detach().clone() if isinstance(value, torch.Tensor) else value
        self._calls.append((function, value, max_norm, norm_type))
        return self._computed - 1 if is_new else None

    def unscale(self, dropped: int) -> None:
        """Note that a loss scaler unscales gradients, after the first ``dropped`` calls."""
        self.clipped_scaled = self.clipped_scaled or any(limit is not None for _, _, limit, _ in self._calls[dropped:])

    def record(self, dropped: int) -> NormRecord:
        """Return what a record has of them, without the first ``dropped``."""
        calls = [NormCall(name, number_of(one), limit, kind) for name, one, limit, kind in self._calls[dropped:]]
        return NormRecord(calls, self.clipped_scaled)


class Losses:
    """Cross-entropies: the labels that count, and the gradient of the loss with respect to that of one of them."""

    def __init__(self) -> None:
        self._tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._are_means: list[bool] = []
        self._labels: list[Compared] = []
        self._factors: list[float | None] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add(
        self, value: torch.Tensor, target: torch.Tensor, options: dict[str, Any], labels: Compared | None = None
    ) -> None:
        """Add one, when its gradient is there, with what its labels are."""
        self._labels += [] if labels is None else [labels]
        count, tokens = (target != options.get("ignore_index", -100)).sum(), self._tokens
        self._are_means.append(options.get("reduction", "mean") == "mean")
        divisor = count if self._are_means[-1] else 1
        value.register_hook(lambda gradient: tokens.append((count, gradient.detach() / divisor)))

    def begin_backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Note by what the losses of a backward pass are means."""
        self._factors += map(factor_of_mean, losses)

    def record(self, dropped: int) -> LossRecord:
        """Return what a record has of them, without the first ``dropped``."""
        tokens = [(int(count), float(weight)) for count, weight in self._tokens[dropped:]]
        flags = host_rows([one.flags for one in self._labels])
        labels = [one.record(own) for one, own in zip(self._labels, flags, strict=True)]
        return LossRecord(tokens, all(self._are_means), labels, self._factors)


class Drops:
    """Gradients that are gone before an optimizer has stepped by them.

    Attributes:
        seen: how much of the step belongs to them.
        for_others: how many backward passes there had been when another model's optimizer stepped.
    """

    def __init__(self) -> None:
        self.seen = StepCounts()
        self.for_others = 0
        self._leaks = 0  # how many when one began after it
        self._left = Left()
        self._all: list[Drop] = []

    def end_backward(self, model: Model) -> None:
        """Note what a backward pass has left."""
        self._left.end_backward(model.parameters())

    def begin_backward(self, backwards: int) -> None:
        """Note that a backward pass begins, for which gradients of another model's may still be there."""
        self._leaks = self._leaks or (backwards if self.for_others else 0)

    def note(self, model: Model, drop: Drop, seen: StepCounts, backwards: Backwards, *, is_cleared: bool) -> None:
        """Note what is left where a forward or a backward begins; see :meth:`left.Left.begin`."""
        self._left.begin(model.parameters(), drop, seen, after=backwards.after.values(), is_cleared=is_cleared)

    def take(self, *, is_last: bool) -> Iterator[Drop]:
        """Yield what is gone."""
        for drop, seen in self._left.gone(is_last=is_last):
            self._all.append(drop)
            self.seen = seen
            self.for_others *= self.for_others > drop.backwards
            self._leaks *= self._leaks > drop.backwards
            yield drop

    @property
    def leaks(self) -> bool:
        """Whether gradients that were computed for another model's optimizer are in those of the step."""
        return self._leaks > 0

    def gone(self, *, is_skipped: bool) -> list[Drop]:
        """Return all that are gone; what was skipped was dropped for that reason, and is no gradient of the step."""
        return [dataclasses.replace(one, is_meant=one.is_meant or is_skipped) for one in self._all]


class WatchedStep:
    """All that is seen of one step.

    Args:
        model: what is watched.
        takes: what is taken of tensors.
        zeroed: how many backward passes had ended at each call of ``zero_grad()`` since the step before.

    Attributes:
        zeroed_since: the same after its optimizers have stepped: of the next one.
    """

    def __init__(self, model: Model, takes: Takes, zeroed: list[int]) -> None:
        self.forwards, self.backwards = Forwards(), Backwards()
        self.updates = Updates(model, takes)
        self.finite, self.norms, self.losses, self.drops = Finite(), Norms(), Losses(), Drops()
        self.draws = Draws()
        self.collectives = Trace()
        self.zeroed, self.zeroed_since = zeroed, list[int]()
        self._model, self._takes = model, takes
        self._buffers: dict[str, torch.Tensor] = {}
        self._started = time.monotonic()

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has."""
        return bool(self.updates.stepped)

    @property
    def has_computed(self) -> bool:
        """Whether there was a backward pass of a root, or an optimizer's step."""
        backwards = self.backwards
        return bool(backwards.own or backwards.is_running or backwards.count or self.has_stepped)

    def read_buffers(self) -> None:
        """Read the buffers before the first forward: after it, DDP has replaced them, and modules count in them."""
        if self._takes.digests:
            self._buffers = self._model.bits_of_buffers()

    def note_zeroed(self) -> None:
        """Note a call of ``zero_grad()``."""
        if self.has_stepped:
            self.zeroed_since.append(0)  # of the next step, which has no backward pass yet
        else:
            self.zeroed.append(self.backwards.count)

    def note_left(self, *, is_again: bool) -> None:
        """Before a forward or a backward: note whether the gradients of earlier ones are gone, and what they were for.

        Of a loop that clears them between the two, the second sees it.

        Args:
            is_again: whether a closure evaluates them again.
        """
        count, drops = self.backwards.count, self.drops
        drop = Drop(count, self.forwards.are_of_input(count) or drops.for_others > 0 or is_again)
        seen = StepCounts(len(self.finite), len(self.norms), len(self.losses))
        drops.note(self._model, drop, seen, self.backwards, is_cleared=count in self.zeroed)

    def gradients(self, stage: Stage, *, of: torch.optim.Optimizer | None = None) -> dict[str, Pending]:
        """Return the gradients; those of an optimizer's parameters are emitted, if one is given."""
        model, found = self._model, dict[str, Pending]()
        self.backwards.has_steps |= self.backwards.is_running and of is not None
        steps = None if of is None else {id(one) for one in parameters_in(of)}
        for name, parameter in model.parameters():
            if (gradient := model.gradient(parameter)) is None:
                continue
            layout = model.place(name, gradient)
            if steps is None or id(parameter) in steps:
                self._emit_gradient(stage, name, gradient, layout)
            if self._takes.digests and (pending := self._pending(name, gradient, layout)) is not None:
                found[name] = pending
        digest([one for one in found.values() if one.digest is None])
        return found

    def _emit_gradient(self, stage: Stage, name: str, gradient: torch.Tensor, layout: Layout | None) -> None:
        microbatch = max(self.backwards.count - 1, 0)
        # What an engine does to it is not seen: its step finds what backward has left.
        for one in (stage,) if self._model.engine is None else (stage, Stage.CLIPPED_GRADIENT):
            self._takes.emit(one, gradient, layout, parameter=name, microbatch=microbatch)

    def _pending(self, name: str, gradient: torch.Tensor, layout: Layout | None) -> Pending | None:
        """Return a gradient whose digest is still to be made; None, and note it, where its elements have no place."""
        if layout is None or (local := self._model.read(name, gradient, layout)) is None:
            self.backwards.unplaced.add(name)
            return None
        pending = Pending(local, layout)
        if self._model.engine is not None:  # one whole gradient at a time
            digest([pending])
        return pending

    def record(self, number: int, gathered: Gathered) -> StepRecord:
        """Make the record of the step: the host reads what was computed on devices.

        Args:
            number: of the step.
            gathered: what forwards have found gathered.
        """
        self.backwards.own.digest()  # an optimizer may step in the middle of a backward
        seconds, dropped = time.monotonic() - self._started, self.drops.seen
        not_finite, is_skipped = self.finite.read(dropped.finite)
        record = StepRecord(
            rank=0, step=number, backwards=self.backwards.count, forwards=self.forwards.record(),
            gradients=self._gradients(is_skipped=is_skipped), parameters=self.updates.parameters(),
            modules=self._modules(gathered), optimizers=self.updates.stepped,
            norms=self.norms.record(dropped.norms), losses=self.losses.record(dropped.tokens), not_finite=not_finite,
            collectives=self.collectives, unseen=sorted(self._model.unseen),
        )  # fmt: skip
        memory = torch.accelerator.memory_allocated() if torch.accelerator.is_available() else None
        record.usage = Usage(memory, seconds)
        return record

    def _modules(self, gathered: Gathered) -> ModuleRecord:
        with_gradient = {*self.backwards.after, *self.updates.at_step}
        found = self._model.record(self.forwards.called, gathered, self._buffers, with_gradient, self.draws)
        if (standing := self.updates.standing) is not None:
            found.standing = standing.record()
        return found

    def _gradients(self, *, is_skipped: bool) -> GradientRecord:
        own, after, at_step = self.backwards.own, self.backwards.after, self.updates.at_step
        record = GradientRecord(
            unplaced=sorted(self.backwards.unplaced), zeroed=self.zeroed,
            drops=self.drops.gone(is_skipped=is_skipped), leaks=self.drops.leaks,
            are_consumed=self.backwards.has_steps,
        )  # fmt: skip
        first = self._first_names()
        pending = [(record.own, *one) for one in own.counted()]
        record.returned = sorted({first.get(name, name) for _, name, _, one in pending if one.is_returned})
        pending += [(record.given, *one) for one in own.counted(is_given=True)]
        seen = _on_host([one for *_, one in pending] + [*after.values(), *at_step.values()])
        for (to, name, number, _), gradient in zip(pending, seen, strict=False):
            to.setdefault(first.get(name, name), []).append((number, gradient))
        rest = seen[len(pending) :]
        record.after_backward = dict(zip(after, rest, strict=False))
        record.at_step = dict(zip(at_step, rest[len(after) :], strict=False))
        return record

    def _first_names(self) -> dict[str, str]:
        """Return the first names of tied parameters whose own gradients were seen under others, by these."""
        own = self.backwards.own.names
        tied = [names for names in self._model.tied() if names[0] not in own]
        return {name: names[0] for names in tied for name in names if name in own}


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    return fingerprints.position_hash(local_of(tensor.detach()))


def _on_host(every: Sequence[Pending]) -> list[Gradient]:
    marks = on_host([one.digest for one in every if one.digest is not None])
    return [
        Gradient(one.layout.box, one.layout.pending, mark, one.dtype) for one, mark in zip(every, marks, strict=True)
    ]
