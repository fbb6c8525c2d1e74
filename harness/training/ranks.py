"""What ranks of a watched training tell each other: what they are when it begins, and what each has seen of a step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training import invariants, sharded
from shardproof.harness.training.evidence import Start, holders_of
from shardproof.harness.training.exchange import Absent, Exchange
from shardproof.harness.training.findings import DoctorFinding
from shardproof.harness.watching.acts import Acts
from shardproof.harness.watching.ledger import Ledger, Read
from shardproof.harness.watching.records import NotWatchable, StepRecord

#: Seconds to wait for the slowest rank in a step that is not watched.
_PATIENCE_OF_LOOKS = 20
#: How many seconds ranks wait for each other at the end of the loop, where one may have ended otherwise.
_PATIENCE_AT_THE_END = 30


class Ranks:
    """Exchanges between all ranks, each of which makes the same calls in the same order.

    Args:
        patience: seconds to wait for the slowest rank.
        on_end: is called before all process groups are destroyed, until :meth:`read` is.

    Attributes:
        rank: the global rank; None before the model is known.
        mine: what this rank is; None before the model is known.
        starts: what each rank is, in the order of ranks; empty before the first exchange.
        holders: by the name of a parameter, the sets of ranks that hold the same elements of it.
        acts: calls of user code, which records of this rank tell to the others.
        are_even: whether all take the same steps, as far as is known: not under ``join()``.
        ledger: which rows this rank reads, in the whole loop.
    """

    def __init__(self, patience: float, on_end: Callable[[], None]) -> None:
        self.rank: int | None = None
        self.mine: Start | None = None
        self.starts: list[Start] = []
        self.holders: dict[str, list[tuple[int, ...]]] = {}
        self.acts = Acts()
        self.are_even = True
        self.ledger = Ledger(on_end)
        self._reads_on = False
        self._patience = patience
        self._exchange: Exchange | None = None

    @property
    def is_there(self) -> bool | None:
        """Whether the group of the exchange still exists; None before there is one."""
        return None if self._exchange is None else self._exchange.is_there

    def begin(self) -> list[DoctorFinding]:
        """Exchange what ranks are, and return what is wrong about it.

        Ranks come together where user code makes the doctor, and at the end of a step; not in a forward: the first one
        may be of one rank alone, or of a stage of a pipeline, for whose output the next stage waits.

        Raises:
            NotWatchable: ranks have built different models; on all of them.
        """
        self._exchange = Exchange(patience=self._patience)
        self.rank = self._exchange.rank
        self.starts = self._exchange.all(self.mine)
        if problem := _different_models(self.starts):
            raise NotWatchable(f"doctor: {problem}")
        self.holders, found = check_starts(self.starts)
        return found

    def all(self, value: Any, *, patience: float | None = None) -> list[Any]:
        """Return the values of all ranks, in their order; see :meth:`exchange.Exchange.all`."""
        assert self._exchange is not None
        return self._exchange.all(value, patience=patience)

    def looks_of(self, seen: Sequence[StepRecord]) -> list[list[StepRecord]] | None:
        """Exchange what ranks see of each root when they look again, and return it by root.

        None where ranks are not at the same step, as where some have had fewer batches.
        """
        self._sign(seen[:1])
        for one in seen:
            one.rank = seen[0].rank
        every = self.all(seen, patience=_PATIENCE_OF_LOOKS)
        if len({(len(mine), mine[0].step) for mine in every}) > 1:
            return None
        return [list(records) for records in zip(*every, strict=True)]

    def records_of(self, seen: StepRecord | int) -> tuple[list[StepRecord], list[DoctorFinding]]:
        """Exchange the records of a step and return them, and what is wrong if only some ranks have taken it.

        Of a step that is skipped there are none: a rank says how many backward passes it has dropped. A rank alone does
        neither.
        """
        self._sign([seen])
        while True:
            records, dropped = parted(self.all(seen))
            if not records or not dropped:
                return records, []
            if found := skipped_by_some(records, dropped):
                return [], found
            # What some drop was nothing to others, as of a rank with gradients of zeros: these come to the same step.
            if not isinstance(seen, StepRecord):
                return [], []

    def joined(self, seen: Sequence[StepRecord | int]) -> tuple[list[list[StepRecord]], bool]:
        """Exchange what ranks have seen under ``join()``: the records of all by step, and whether all saw as many."""
        self._sign(seen)
        self.are_even = False
        every = self.all(seen)
        steps: list[list[StepRecord]] = []
        for told in zip(*every, strict=False):
            records = [one for one in told if isinstance(one, StepRecord)]
            if len(records) not in (0, len(told)):  # of a step that is skipped there is none
                return steps, False
            if records:
                steps.append(records)
        return steps, len({len(one) for one in every}) == 1

    def _sign(self, seen: Sequence[StepRecord | int]) -> None:
        """Write into records of which rank they are, and its calls: a watch does not know them."""
        assert self.rank is not None
        for one in seen:
            if isinstance(one, StepRecord):
                one.rank, one.modules.acts = self.rank, self.acts.take()

    def read(self) -> list[Read]:
        """Return what each rank has read, once, when the loop or its process groups end; nothing if not all tell."""
        if self._exchange is None or not self.is_there or self.ledger.is_closed:
            return []
        mine = self.ledger.take()
        self.ledger.close()
        try:
            return self._exchange.all(mine, patience=_PATIENCE_AT_THE_END)
        except Absent:
            return []

    @contextlib.contextmanager
    def reading_on(self) -> Iterator[None]:
        """Keep the group and the ledger where :meth:`close` is called in this context: the loop goes on."""
        self._reads_on = True
        try:
            yield
        finally:
            self._reads_on = False

    def close(self) -> None:
        """Give the group back."""
        if self._reads_on:
            return
        self.ledger.close()
        if self._exchange is not None:
            self._exchange.close()


def check_starts(starts: Sequence[Start]) -> tuple[dict[str, list[tuple[int, ...]]], list[DoctorFinding]]:
    """Return which ranks hold the same elements of a root when its training begins, and what is wrong by then."""
    holders, differ = holders_of(starts)
    return holders, [*invariants.check_start(starts, differ), *sharded.check_mixed(starts)]


def parted(told: Sequence[StepRecord | int]) -> tuple[list[StepRecord], dict[int, int]]:
    """Return the records among what all ranks tell of a step, and what the other ranks have dropped."""
    records = [one for one in told if isinstance(one, StepRecord)]
    return records, {rank: one for rank, one in enumerate(told) if isinstance(one, int)}


def skipped_by_some(records: Sequence[StepRecord], dropped: Mapping[int, int]) -> list[DoctorFinding]:
    """Return what is wrong where some ranks have a record and others dropped backward passes; see :func:`parted`.

    Nothing where each record has more backward passes than were dropped: these ranks come to the same step.
    """
    if all(one.backwards > max(dropped.values()) for one in records):
        return []
    return [invariants.of_skip(records[0].step, list(dropped), len(records) + len(dropped))]


def _different_models(starts: Sequence[Start]) -> str:
    """Return what makes ranks impossible to compare, in one line; nothing if they have built one model."""
    for rank, start in enumerate(starts):
        for name in start.shapes:
            without = [other for other, one in enumerate(starts) if name not in one.shapes]
            if without and _are_of_one_model(start, starts[without[0]]):
                shape = tuple(start.shapes[name])
                return (
                    f"rank {rank} has {name!r} {shape}, {ranks_of(without)} do{'es' * (len(without) == 1)} not: "
                    "the ranks built different models"
                )
    return ""


def _are_of_one_model(one: Start, other: Start) -> bool:
    """Whether ranks have built one model as far as both have it; stages of a pipeline may have the same names."""
    both = [(one.bits[name], other.bits[name]) for name in one.bits if name in other.bits]
    if any(mine[1] or theirs[1] for mine, theirs in both) or one.replicated:
        return bool(both)
    return bool(both) and all(mine[0] == theirs[0] and mine[2] == theirs[2] for mine, theirs in both)
