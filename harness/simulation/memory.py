"""Counts the bytes that one rank holds while a simulation runs: what is allocated and freed, when, and what for.

A ledger sees each storage when an operator makes it, and again when the last reference to it is gone or its size
changes. What a storage is for may be known later only, when a gradient is found where the optimizer reads it. So the
ledger keeps the changes, and sums are made from them afterwards.
"""

import contextlib
import dataclasses
import enum
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardproof.harness.collectives.recorder import kind_of
from shardproof.harness.tensors import private
from shardproof.harness.tensors.private import TorchDispatchMode
from shardproof.harness.tensors.trees import local_of, tensors_of


class Kind(enum.StrEnum):
    """What memory is for. Of several, the first of this order applies."""

    SHARDS = "shards"
    """What this rank holds of the parameters, and master copies of them."""

    GRADIENTS = "gradients"
    """What it holds of the gradients that the optimizer reads."""

    OPTIMIZER = "optimizer"
    """The optimizer's state."""

    GATHERED = "gathered"
    """Whole parameters, and the buffers into and out of which they are gathered."""

    WHOLE_GRADIENTS = "whole gradients"
    """Gradients of whole parameters before their reduction, where they lie beside the buffer of it."""

    REDUCTION = "reduction"
    """What reductions read and write."""

    ACTIVATIONS = "activations"
    """All else: what forward saves, temporary tensors, inputs, buffers of modules."""


_RANKS = {kind: index for index, kind in enumerate(Kind)}

#: Operators that move values as they are, by the beginnings of their names: what they write is of the kind that it is
#: copied for.
_COPIES = (
    "aten::copy_", "aten::_foreach_copy_", "aten::cat", "aten::_to_copy", "aten::clone", "aten::constant_pad_nd",
    "aten::split_with_sizes_copy", "aten::_chunk_cat", "aten::div", "fsdp::",
)  # fmt: skip
#: Of these, those that write to a tensor that was there.
_COPIES_INTO = ("aten::copy_", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "fsdp::")


@dataclasses.dataclass(eq=False)
class Allocation:
    """One storage, from its allocation until it is freed."""

    nbytes: int  # its size in bytes, as last seen; 0 once it is freed
    made_by: str
    phase: str
    kind: Kind = Kind.ACTIVATIONS
    # Of what it is a copy, where it was made or written by an operator that copies.
    sources: list[weakref.ref["Allocation"]] = dataclasses.field(default_factory=list)
    reference: Any = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes that were held at one moment, by kind; kinds without any are absent."""

    step: int  # the number of the step; -1 before the first
    phase: str
    by_kind: dict[Kind, int]
    during: str = ""  # the operator that ran

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.by_kind.values())

    def of(self, kind: Kind) -> int:
        """Return the bytes of one kind."""
        return self.by_kind.get(kind, 0)


@dataclasses.dataclass(frozen=True)
class _Change:
    allocation: Allocation
    delta: int
    step: int
    phase: str
    during: str


class Ledger(TorchDispatchMode):
    """Counts storages while it is active and not paused, by step, of which -1 is before the first, and by phase."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.phase = -1, ""
        self._live: dict[int, Allocation] = {}
        self._changes: list[_Change] = []
        self._reduced: list[Allocation] = []
        self._operator = ""
        self.is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As for a Recorder: nothing is compiled, and the wrapper costs more than the counting.
        return False

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what is allocated and freed in this context, and assign it to ``phase``."""
        resize = torch.UntypedStorage.resize_
        # What is freed after the context, by the last reference that the caller has, belongs to it too.
        self.phase = phase

        def noting(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            # No operator resizes a storage, which is how implementations free and reuse what they gather into.
            result: torch.UntypedStorage = resize(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = noting  # type: ignore[method-assign, assignment]
        try:
            with self, _shapes_of_dtensors(self):
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # DTensor dispatches first, as for a Recorder.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        self._operator = name
        result = func(*args, **(kwargs or {}))
        made = [self.allocation_of(tensor) for tensor in tensors_of(result)]
        if name.startswith(_COPIES):
            self._note_copies(func, name, args, kwargs or {}, made)
        if (kind := kind_of(name)) is not None:
            self._note_collective(kind, func, args, kwargs or {}, made)
        return result

    def allocation_of(self, tensor: torch.Tensor) -> Allocation:
        """Return the storage of a tensor; one that was made outside of every context is counted from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        allocation = self._live.get(key)
        if allocation is None:
            allocation = Allocation(0, self._operator, self.phase)
            allocation.reference = weakref.ref(storage, lambda _: self._freed(key))
            self._live[key] = allocation
        if (nbytes := storage.nbytes()) != allocation.nbytes:
            self._change(allocation, nbytes)
        return allocation

    def mark_sharded(self, others: Iterable[torch.Tensor]) -> None:
        """Note that what is held now is for shards, but for these other tensors: after a model was sharded.

        A rank may hold a share of which no parameter shows anything, such as the padding behind the last one.
        """
        apart = {id(self.allocation_of(tensor)) for tensor in others}
        for allocation in self._live.values():
            if id(allocation) not in apart:
                _mark(allocation, Kind.SHARDS)

    def mark_reduced(self) -> None:
        """Note that what reductions have written and what is still held is for gradients: after backward."""
        for allocation in self._reduced:
            if allocation.nbytes:
                _mark(allocation, Kind.GRADIENTS)
        self._reduced.clear()

    def mark(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Note what tensors are for; what they are for already stays if it comes before."""
        for tensor in tensors:
            _mark(self.allocation_of(local_of(tensor)), kind)

    def _freed(self, key: int) -> None:
        self._change(self._live.pop(key), 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        allocation = self._live.get(storage._cdata)
        if allocation is not None and allocation.nbytes != storage.nbytes():
            self._change(allocation, storage.nbytes())

    def _change(self, allocation: Allocation, nbytes: int) -> None:
        if nbytes != allocation.nbytes:
            self._changes.append(_Change(allocation, nbytes - allocation.nbytes, self.step, self.phase, self._operator))
            allocation.nbytes = nbytes

    def _note_copies(self, func: Any, name: str, args: Any, kwargs: Any, made: list[Allocation]) -> None:
        written, read = _written_and_read(func, args, kwargs)
        into = [self.allocation_of(tensor) for tensor in written] or made
        sources = [self.allocation_of(tensor) for tensor in read]
        if self.phase == "backward":
            for allocation in into:
                allocation.sources += [weakref.ref(source) for source in sources if source is not allocation]
        if name.startswith(_COPIES_INTO) and written and any(one.kind == Kind.GATHERED for one in sources):
            for allocation in into:
                _mark(allocation, Kind.GATHERED)

    def _note_collective(self, kind: str, func: Any, args: Any, kwargs: Any, made: list[Allocation]) -> None:
        involved = {id(allocation): allocation for allocation in made}
        for tensor in tensors_of([args, kwargs]):
            allocation = self.allocation_of(tensor)
            involved[id(allocation)] = allocation
        if kind in ("all_gather", "broadcast"):
            for allocation in involved.values():
                _mark(allocation, Kind.GATHERED)
        elif kind in ("reduce_scatter", "all_reduce", "reduce"):
            written, _ = _written_and_read(func, args, kwargs)
            self._reduced += made if kind == "reduce_scatter" and not written else map(self.allocation_of, written)
            for allocation in involved.values():
                self._mark_sources(allocation)
                _mark(allocation, Kind.REDUCTION)

    def _mark_sources(self, allocation: Allocation) -> None:
        """Note of what a reduction's input is a copy: whole gradients, as autograd has made them."""
        waiting, seen = [allocation], {id(allocation)}
        while waiting:
            one = waiting.pop()
            sources, one.sources = one.sources, []
            for reference in sources:
                source = reference()
                if source is None or id(source) in seen or source.phase != "backward":
                    continue
                seen.add(id(source))
                _mark(source, Kind.WHOLE_GRADIENTS)
                waiting.append(source)

    # sums ----------------------------------------------------------------------------------

    def held(self) -> Usage:
        """Return what is held now."""
        by_kind: dict[Kind, int] = {}
        for allocation in self._live.values():
            if allocation.nbytes:
                by_kind[allocation.kind] = by_kind.get(allocation.kind, 0) + allocation.nbytes
        return Usage(self.step, self.phase, _in_order(by_kind))

    def peak(
        self, *, step: int | None = None, phase: str | None = None, kinds: Collection[Kind] = tuple(Kind)
    ) -> Usage:
        """Return what was held when most bytes of some kinds were: the first such moment.

        It is that of one step, of which -1 is what comes before the first, and of one phase, if they are given; a
        ValueError if nothing was allocated or freed then.
        """
        held: dict[Kind, int] = dict.fromkeys(Kind, 0)
        total, best, found = 0, -1, None
        for change in self._changes:
            if change.allocation.kind not in kinds:
                continue
            counts = step in (None, change.step) and phase in (None, change.phase)
            if counts and total > best:
                # What was held when the phase began counts too.
                best, found = total, Usage(change.step, change.phase, _in_order(held), "")
            held[change.allocation.kind] += change.delta
            total += change.delta
            if counts and total > best:
                best, found = total, Usage(change.step, change.phase, _in_order(held), change.during)
        if found is None:
            raise ValueError("nothing was allocated or freed in this phase")
        return found

    def most_in_a_step(self) -> int:
        """Return the most bytes that were held in a step; 0 without one."""
        steps = {change.step for change in self._changes if change.step >= 0}
        return max((self.peak(step=step).total for step in steps), default=0)

    def peaks(self, *, step: int) -> dict[str, Usage]:
        """Return the peak of each phase of a step, in the order of the phases."""
        phases = dict.fromkeys(change.phase for change in self._changes if change.step == step)
        return {phase: self.peak(step=step, phase=phase) for phase in phases}


@contextlib.contextmanager
def _shapes_of_dtensors(ledger: Ledger) -> Iterator[None]:
    """Leave out the tensors on which DTensor computes the whole shape of a result, once for each operator.

    In a real run they have no memory. Here nothing has, and they would count.
    """
    path = "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached"
    computes = private.need(path)

    @functools.wraps(computes)
    def paused(*args: Any, **kwargs: Any) -> Any:
        before, ledger.is_paused = ledger.is_paused, True
        try:
            return computes(*args, **kwargs)
        finally:
            ledger.is_paused = before

    private.put(path, paused)
    try:
        yield
    finally:
        private.put(path, computes)


def _mark(allocation: Allocation, kind: Kind) -> None:
    if _RANKS[kind] < _RANKS[allocation.kind]:
        allocation.kind = kind


def _in_order(by_kind: dict[Kind, int]) -> dict[Kind, int]:
    return {kind: by_kind[kind] for kind in Kind if by_kind.get(kind)}


def _written_and_read(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator writes to and those that it reads, by its schema."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.name in named:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(tensors_of(named[argument.name]))
    return written, read


# The most that a rank holds in each part of a step: of all kinds together, and of each kind by itself.


@dataclasses.dataclass
class Extreme:
    """The most bytes in one part of a step: by kind when most were held, and of each kind at its own moment."""

    at_peak: dict[Kind, int]
    most: dict[Kind, int]

    def note(self, held: Mapping[Kind, int]) -> None:
        """Count what is held at one moment."""
        if sum(held.values()) > sum(self.at_peak.values()):
            self.at_peak = dict(held)
        for kind, nbytes in held.items():
            self.most[kind] = max(self.most[kind], nbytes)


def extremes(ledger: Ledger, *, step: int, parts: Sequence[Sequence[str]]) -> list[Extreme]:
    """Return the extremes of each part of the last step, of which each part is several phases, in order.

    What is held when a part begins counts in it, also if nothing is allocated or freed in the part.
    """
    held = dict.fromkeys(Kind, 0)
    part_of = {phase: index for index, phases in enumerate(parts) for phase in phases}
    found: list[Extreme] = []

    def begin(until: int) -> None:
        while len(found) <= until:
            found.append(Extreme(dict(held), dict(held)))

    for change in ledger._changes:
        index = part_of.get(change.phase) if change.step == step else None
        if index is not None:
            begin(index)
        held[change.allocation.kind] += change.delta
        if index is not None:
            found[index].note(held)
    begin(len(parts) - 1)
    return found
