"""Which rows a process reads in its whole run: the indices that loaders draw, and permutations that user code draws.

It goes on after the watched steps, because shards that overlap in a later epoch are in no earlier step. It reads no
tensor of the training: integers of the host alone, of which it keeps an order as one number, and few of them as a set.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, Subset

from shardproof.harness.watching import calls
from shardproof.harness.watching.division import Division, division_of
from shardproof.harness.watching.hooks import quiet
from shardproof.harness.watching.optimizers import STEPS
from shardproof.harness.watching.streamed import rows_given
from shardproof.harness.watching.tables import NameTable, tables_of, tables_of_script

#: How many indices of an epoch are kept, on all ranks together; of larger data every so many-th row of the data.
MOST_INDICES = 1 << 15

#: How many epochs are kept, of how many of the first and of the last ones with their indices.
_MOST_EPOCHS, _WITH_INDICES = 256, 2

#: How many data sets that samplers divide are kept.
_MOST_DIVISIONS = 16

#: How many permutations of one size are kept, and how many of their values stand for one.
_MOST_PERMUTATIONS, _MOST_VALUES = 256, 4096

#: How many epochs of an IterableDataset are kept, of how many rows each.
_MOST_STREAMS, _MOST_STREAMED = 4, 1 << 13

#: How many samplers are looked for in one another.
_MOST_WRAPPERS = 8

#: The fewest values of a permutation that may be one of rows.
_FEWEST = 8


@dataclasses.dataclass(frozen=True)
class Data:
    """The data set of a loader, and what draws from it; equal on ranks that divide one data set."""

    kind: str  # the names of the class of the data set and of the sampler: "TensorDataset, DistributedSampler"
    size: int  # its rows
    base: int  # those of what it is a Subset of
    batch: int  # how many rows a batch has; 0 where that is not known
    split: int = 0  # of a Subset the number of the object that it is one of, among those that loaders read; else 0


@dataclasses.dataclass
class Epoch:
    """A pass of a loader over its data.

    Attributes:
        subset: stands for the rows of ``base`` that the data set has.
        planned: how many rows the sampler says it gives; None where it says nothing.
        drawn: how many it has given.
        order: stands for them, in order.
        batches: how many batches they were.
        rows: of them those whose number in ``base`` is a multiple of ``every``; None where they are not kept.
        is_complete: whether the sampler has come to its end.
        begins: how many steps the leading optimizer had made at the first index.
        ends: how many when the last batch was given, or asked for.
        optimizer: the number of that optimizer at the end.
        number: the last argument of the sampler's ``set_epoch()``; -1 where it is not known, None without this method.
        shuffles: whether the sampler says so itself: ``DistributedSampler(shuffle=True)``, ``RandomSampler``.
        replaces: whether it may draw a row again.
    """

    data: Data
    subset: int
    planned: int | None
    every: int
    begins: int
    number: int | None
    shuffles: bool
    replaces: bool
    drawn: int = 0
    order: int = 0
    batches: int = 0
    rows: array.array[int] | None = dataclasses.field(default_factory=lambda: array.array("q"))
    is_complete: bool = False
    ends: int = 0
    optimizer: int = 0

    @property
    def given(self) -> int | None:
        """How many rows it has in all; None where that is not known."""
        return self.drawn if self.is_complete else self.planned

    @property
    def trains(self) -> bool:
        """Whether there is about a step of the optimizer for each of its batches, or for each of a few."""
        steps = self.ends - self.begins
        return 0 < 2 * steps <= 3 * self.batches + 4 and self.batches <= 128 * (steps + 1)


@dataclasses.dataclass(frozen=True)
class Permutation:
    """A permutation that user code has drawn, after how many steps of the leading optimizer."""

    size: int
    bits: int
    step: int


@dataclasses.dataclass
class Read:
    """The rows that a rank has read in its run, in order.

    Attributes:
        epochs: of loaders that train.
        held_out: of loaders of Subsets that do not, as those of an evaluation.
        streams: epochs of loaders of an IterableDataset that train, whose ``rows`` stand for values and are no numbers.
        tables: numbers of names that data sets and the script have, by where they are.
        permutations: those that user code draws.
        workers: by the class of an IterableDataset, the worker processes of its loader.
        divisions: data sets that samplers divide among ranks, those of an evaluation too, each once.
        steps: how many the leading optimizer has made.
    """

    epochs: list[Epoch] = dataclasses.field(default_factory=list)
    workers: dict[str, int] = dataclasses.field(default_factory=dict)
    permutations: list[Permutation] = dataclasses.field(default_factory=list)
    steps: int = 0
    held_out: list[Epoch] = dataclasses.field(default_factory=list)
    streams: list[Epoch] = dataclasses.field(default_factory=list)
    tables: dict[str, NameTable] = dataclasses.field(default_factory=dict)
    divisions: list[Division] = dataclasses.field(default_factory=list)


class _Leader:
    """The first optimizer that steps, whose steps are counted; the next one once it is gone."""

    def __init__(self) -> None:
        self.steps = self.number = 0
        self._ref: Callable[[], Any] = lambda: None

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step."""
        if self._ref() is None:
            self._ref = weakref.ref(optimizer)
            self.number += 1
        self.steps += self._ref() is optimizer


class _Known:
    """Numbers data sets in the order in which loaders read them first."""

    def __init__(self) -> None:
        self._count = 0
        #: By id what refers to each; a list has no weak reference, and is known by its id alone.
        self._numbers: dict[int, tuple[Callable[[], Any] | None, int]] = {}

    def is_new(self, data: Any) -> bool:
        """Number an object; whether it had no number before, is returned."""
        before = self._count
        return self.number(data) > before

    def number(self, data: Any) -> int:
        """Return the number of an object, from 1."""
        ref, number = self._numbers.get(id(data), (lambda: None, 0))
        if ref is not None and ref() is not data:
            self._count = number = self._count + 1
            self._numbers = {key: one for key, one in self._numbers.items() if one[0] is None or one[0]() is not None}
            self._numbers[id(data)] = None if isinstance(data, (list, tuple)) else weakref.ref(data), number
        return number


@dataclasses.dataclass
class _Open:
    """An epoch of a loader that is iterated over: what draws, and which rows of the base its indices are."""

    epoch: Epoch
    sampler: Any
    maps: list[Sequence[int]]


class Ledger(contextlib.AbstractContextManager["Ledger"]):
    """Notes what this process reads while it is entered.

    Args:
        on_end: is called before all process groups are destroyed.

    Attributes:
        is_closed: whether it has ended.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end, self.is_closed = on_end, False
        self._leader = _Leader()
        self._read = Read()
        self._open: weakref.WeakKeyDictionary[Any, _Open] = weakref.WeakKeyDictionary()
        self._streams: weakref.WeakKeyDictionary[Any, Epoch] = weakref.WeakKeyDictionary()
        self._data = _Known()
        self._counts: dict[int, int] = {}
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Ledger:
        self._patches.enter_context(calls.read(self))
        self._patches.callback(STEPS.add(lambda *_: None, self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Note nothing more, and forget what was noted."""
        self.is_closed = True
        self._patches.close()
        self._open.clear()
        self._streams.clear()
        self._data = _Known()
        self._read = Read()

    def take(self) -> Read:
        """Return what was read."""
        self._read.steps = self._leader.steps
        with contextlib.suppress(Exception):
            self._read.tables = {**tables_of_script(), **self._read.tables}
        return dataclasses.replace(
            self._read,
            epochs=[one for one in self._read.epochs if one.trains],
            held_out=[one for one in self._read.epochs if one.data.split and not one.trains and one.rows],
            streams=[one for one in self._read.streams if one.trains],
        )

    def on_destroy(self) -> None:
        """Tell of the end."""
        self._on_end()

    @quiet
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leader.take(optimizer)

    # Loaders --------------------------------------------------------------------------------

    @quiet
    def on_drawn(self, iterator: Any, indices: Any) -> None:
        """Note the indices of a batch."""
        opened = self._open.get(iterator)
        if opened is None or opened.epoch.is_complete or opened.sampler is not iterator._sampler_iter:
            if (opened := self._begin(iterator)) is None:
                return
            self._open[iterator] = opened
        epoch = opened.epoch
        batch = [int(one) for one in (indices if isinstance(indices, (list, tuple)) else (indices,))]
        epoch.order = hash((epoch.order, *batch))
        epoch.drawn, epoch.batches, epoch.ends = epoch.drawn + len(batch), epoch.batches + 1, self._leader.steps
        epoch.optimizer = self._leader.number
        if epoch.rows is None:
            return
        for rows in opened.maps:
            batch = [int(rows[one]) for one in batch]
        epoch.rows.extend(batch if epoch.every == 1 else [one for one in batch if one % epoch.every == 0])
        if len(epoch.rows) > 2 * MOST_INDICES:  # of a sampler that has no end
            epoch.rows = None

    @quiet
    def on_all_drawn(self, iterator: Any) -> None:
        """Note that an epoch has all its rows."""
        if (opened := self._open.get(iterator)) is not None:
            opened.epoch.is_complete = True
            opened.epoch.ends = self._leader.steps

    @quiet
    def on_given(self, iterator: Any, batch: Any) -> None:
        """Note when a batch is given, which may have been drawn long before, and rows that have no numbers."""
        if (opened := self._open.get(iterator)) is not None:
            opened.epoch.ends = self._leader.steps
        elif isinstance(iterator._dataset, IterableDataset):
            epoch = self._streams.get(iterator)
            if epoch is None or iterator._num_yielded == 1:  # workers may be kept from epoch to epoch
                epoch = self._streams[iterator] = self._begin_stream(iterator)
            epoch.batches, epoch.ends, epoch.optimizer = epoch.batches + 1, self._leader.steps, self._leader.number
            if epoch.rows is not None and len(epoch.rows) < _MOST_STREAMED:
                epoch.rows.extend(rows_given(batch))

    def _begin_stream(self, iterator: Any) -> Epoch:
        """Begin an epoch of rows without numbers, which are kept of the first ones."""
        kind = type(iterator._dataset).__name__
        data = Data(kind, 0, 0, getattr(iterator._index_sampler, "batch_size", None) or 0)
        epoch = Epoch(data, 0, None, 1, self._leader.steps, None, shuffles=False, replaces=False)
        streams = self._read.streams
        if sum(one.data == data for one in streams) < _MOST_STREAMS and len(streams) < _MOST_EPOCHS:
            streams.append(epoch)
        else:
            epoch.rows = None
        return epoch

    def _begin(self, iterator: Any) -> _Open | None:
        """Begin an epoch; None of data without rows that have numbers, or where no more are kept."""
        data, sampler = iterator._dataset, iterator._index_sampler
        if self._data.is_new(data):
            new = {**tables_of_script(), **tables_of(data, iterator._collate_fn)}
            self._read.tables = {**new, **self._read.tables}
            if not isinstance(data, IterableDataset):
                self._note_division(data, sampler)
        if isinstance(data, IterableDataset):
            self._read.workers[type(data).__name__] = iterator._num_workers
            return None
        batch = getattr(sampler, "batch_size", None) or 0
        within = _innermost(sampler)
        size, subset, maps = len(data), 0, []
        kind = f"{type(data).__name__}, {type(within).__name__}"
        while type(data) is Subset:
            subset = zlib.crc32(array.array("q", _strided(data.indices)).tobytes(), subset)
            maps.append(data.indices)
            data = data.dataset
        found = Data(kind, size, len(data), batch, self._data.number(data) if maps else 0)
        number = getattr(within, "epoch", None)
        number = (number if isinstance(number, int) else -1) if hasattr(within, "set_epoch") else None
        shuffles = bool(getattr(within, "shuffle", False)) or type(within).__name__ == "RandomSampler"
        epoch = Epoch(
            found, subset, _planned(within if type(sampler) is BatchSampler else sampler, batch),
            max(1, -(-found.base // MOST_INDICES)), self._leader.steps,
            number, shuffles, bool(getattr(within, "replacement", False)),
        )  # fmt: skip
        self._keep(epoch)
        return _Open(epoch, iterator._sampler_iter, maps)

    @quiet
    def _note_division(self, data: Any, sampler: Any) -> None:
        divisions = self._read.divisions
        if len(divisions) < _MOST_DIVISIONS and (found := division_of(data, sampler, self._leader.steps)) is not None:
            divisions.append(found)

    def _keep(self, epoch: Epoch) -> None:
        epochs = self._read.epochs
        of_kind = [one for one in epochs if one.data == epoch.data and one.rows is not None]
        for one in of_kind[_WITH_INDICES : 1 - _WITH_INDICES]:
            one.rows = None
        epochs.append(epoch)
        if len(epochs) > _MOST_EPOCHS:
            # Loaders that do not train are left out first, then those in the middle.
            idle = next((number for number, one in enumerate(epochs[:-1]) if one.is_complete and not one.trains), None)
            del epochs[_MOST_EPOCHS // 2 if idle is None else idle]

    # Permutations ---------------------------------------------------------------------------

    @quiet
    def on_permutation(self, values: Any) -> None:
        """Note a permutation of numbers or names."""
        if isinstance(values, torch.Tensor) and (values.device.type != "cpu" or type(values) is not torch.Tensor):
            return
        size = len(values)
        if size < _FEWEST or self._counts.get(size, 0) >= _MOST_PERMUTATIONS:
            return
        few = _strided(values)
        few = few.tolist() if hasattr(few, "tolist") else list(few)
        if not all(isinstance(one, (int, str)) for one in few):
            return
        self._counts[size] = self._counts.get(size, 0) + 1
        bits = zlib.crc32("\0".join(map(str, few)).encode())
        self._read.permutations.append(Permutation(size, bits, self._leader.steps))


def _innermost(sampler: Any) -> Any:
    """Return the sampler of rows that one of batches has, and those that wrap it."""
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
        if inner is None:
            break
        sampler = inner
    return sampler


def _planned(sampler: Any, batch: int) -> int | None:
    """Return how many rows a sampler gives in an epoch; None where it says nothing."""
    try:
        count = len(sampler)
    except (TypeError, NotImplementedError):
        return None
    return count * batch if batch and getattr(sampler, "batch_size", None) else count


def _strided(values: Any) -> Any:
    return values[:: max(1, len(values) // _MOST_VALUES)]
