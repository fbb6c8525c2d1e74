"""Further roots of a loop than the first: the exchange about them between ranks, and the judgement of each.

No rank waits for another because of them: ranks exchange what they see of them where they meet for the first root.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.judging import codes
from shardproof.harness.training import invariants, reduction
from shardproof.harness.training.evidence import Evidence, Start
from shardproof.harness.training.examination import Examination
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.training.ranks import check_starts, parted, skipped_by_some
from shardproof.harness.training.starts import Starts
from shardproof.harness.watching.groups import places_of_flat
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.records import StepRecord
from shardproof.harness.watching.roots import Family, called_as, labels
from shardproof.harness.watching.watch import Watch

#: The number of further roots that are watched.
_MOST = 7

#: For how many steps more ranks meet where a root that has begun has steps to come.
_FURTHER = 16

#: What is of the whole process, and told of the first root.
_OF_ALL = frozenset({codes.COLLECTIVES, codes.MEMORY, codes.TOKENS})

#: Findings of these may follow in one root from gradients of another.
_OF_REPLICAS = frozenset({codes.EQUAL_PARAMETERS, codes.EQUAL_GRADIENTS, codes.EQUAL_STATES, codes.NORM})

Key = tuple[str, tuple[str, ...], int]
"""The same root on all ranks: its class, the names of its parameters, and its number among the roots with the same."""


class Told(NamedTuple):
    """The message of a rank about one root.

    Attributes:
        start: what the rank is for it.
        seen: the steps that have ended since the message before, or how many backward passes a step has dropped.
        ties: the names of parameters that should be one.
    """

    key: Key
    start: Start
    seen: list[StepRecord | int]
    ties: list[tuple[str, ...]]


class Telling(NamedTuple):
    """The message of a rank about all further roots.

    Attributes:
        waits: whether some of them have steps to come.
        idle: what is called and wrapped and has gradients, and is in no optimizer: its class, and its parameters.
    """

    roots: list[Told]
    waits: bool
    idle: list[tuple[str, tuple[str, ...]]]


@dataclasses.dataclass
class _Mine:
    """One root on this rank."""

    key: Key
    start: Start
    watch: Watch
    seen: list[StepRecord | int]
    module: nn.Module

    def told(self, ties: list[tuple[str, ...]], rank: int) -> Told:
        """Return what is new of it."""
        seen, self.seen[:] = list(self.seen), []
        for one in seen:
            if isinstance(one, StepRecord):
                one.rank = rank
        return Told(self.key, self.start, seen, ties)


class Mine:
    """The further roots of this rank.

    Args:
        family: all watches of the loop.
        steps: those to watch.
        watch_by: makes a watch, from what takes its records and its drops.
        starts: makes their starts.
        on_last: called when the last step of one has ended.
    """

    def __init__(
        self, family: Family, steps: Sequence[int], watch_by: Callable[..., Watch], starts: Starts,
        on_last: Callable[[], None],
    ) -> None:  # fmt: skip
        self.family = family
        self._on_last = on_last
        self._last = steps[-1]
        self._watch_by, self._starts = watch_by, starts
        self._all: list[_Mine] = []

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_full(self) -> bool:
        """Whether no more of them are looked for."""
        return len(self._all) == _MOST or self.family.steps > (_MOST + 1) * (self._last + 1) + _FURTHER

    def attach(self, module: nn.Module, made_for: torch.optim.Optimizer | None) -> Watch:
        """Watch one; ``made_for`` is the optimizer that was made for it, if it has none of its parameters."""
        seen: list[StepRecord | int] = []

        def take(record: StepRecord) -> None:
            seen.append(record)
            if record.step == self._last:
                self._on_last()

        watch = self._watch_by(take, on_drop=seen.append)
        watch.attach(module)
        watch.model.flat_places = places_of_flat([module])
        start = self._starts.of(watch.model, [module], call=called_as(), has_more=self.family.others_to_come())
        names = start.model, tuple(start.bits)
        number = sum(one.key[:2] == names for one in self._all)
        self._all.append(_Mine((*names, number), start, watch, seen, module))
        if made_for is not None:
            self.family.take_made_for(made_for, watch)
        for one in self.family:
            one.forget_strangers()
        return watch

    def drop_inside(self, root: nn.Module) -> None:
        """Forget those that are parts of a root."""
        inside = set(root.modules())
        for one in [one for one in self._all if one.module in inside]:
            one.watch.detach()
            self.family.remove(one.watch)
            self._all.remove(one)

    def end_steps(self) -> None:
        """End the step of each, if an optimizer has stepped in it."""
        for one in self._all:
            one.watch.end_step()

    def model(self, key: Key) -> Model | None:
        """Return the model of one, as its watch knows it."""
        return next((one.watch.model for one in self._all if one.key == key), None)

    def modules(self) -> Iterator[nn.Module]:
        """Yield all their modules."""
        for one in self._all:
            yield from one.module.modules()

    @property
    def roots(self) -> list[tuple[Sequence[nn.Module], int]]:
        """The modules of each that the loop calls, and its steps that have ended."""
        return [(one.watch.model.roots or [one.module], one.watch.step) for one in self._all]

    def labels(self, first: Sequence[Start]) -> list[str]:
        """Return names of the first root and of these, as this rank has them."""
        return labels(one.name for one in (*first[:1], *(one.start for one in self._all)))

    def tell(self, step: int) -> Telling:
        """Return what is new of them when a step of the first root ends."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        told = [one.told(self._starts.ties(one.watch.model.roots), rank) for one in self._all]
        return Telling(told, self._wait(step), self.family.idle())

    def _wait(self, step: int) -> bool:
        if any(one.watch.step <= self._last for one in self._all):
            return step < self._last + _FURTHER
        return self._last <= step < 2 * self._last + 1 and self.family.others_to_come()

    def detach(self) -> None:
        """Remove all hooks."""
        for one in self._all:
            one.watch.detach()


class Root:
    """A further root, judged alike on all ranks.

    Attributes:
        starts: what each rank is for it, in the order of ranks; incomplete while messages of ranks are missing.
        examination: of its steps.
    """

    def __init__(self, world: int, checks: Collection[str], *, waits: bool) -> None:
        self.examination = Examination(frozenset(checks) - _OF_ALL, waits=waits)
        self._starts: dict[int, Start] = {}
        self._queues: list[list[StepRecord | int]] = [[] for _ in range(world)]
        self._ties: list[tuple[str, ...]] = []
        self._holders: dict[str, list[tuple[int, ...]]] | None = None
        self._is_over = False

    @property
    def starts(self) -> list[Start]:
        """The start of each rank that has sent one, in the order of ranks."""
        return [self._starts[rank] for rank in sorted(self._starts)]

    @property
    def holders(self) -> dict[str, list[tuple[int, ...]]]:
        """By parameter, the sets of ranks that hold the same elements."""
        return self._holders or {}

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks have sent their start."""
        return len(self._starts) == len(self._queues)

    def hear(self, rank: int, told: Told) -> None:
        """Take what a rank tells."""
        self._starts.setdefault(rank, told.start)
        self._queues[rank] += told.seen
        self._ties = told.ties

    def judge(self, last: int, *, are_others_reduced: bool) -> Iterator[DoctorFinding]:
        """Judge the steps of which all ranks have sent records.

        Args:
            last: the last step to watch.
            are_others_reduced: whether something reduces the gradients of another root.
        """
        if not self.is_of_all:
            return
        if self._holders is None:
            self._holders, found = check_starts(self.starts)
            yield from self.examination.add(found)
        while not self._is_over and all(self._queues):
            records, dropped = self._take_heads()
            if records and dropped:
                found = skipped_by_some(records, dropped)
                self._is_over = bool(found)
                yield from self.examination.add(found)
            elif records:
                yield from self._judge(records, are_others_reduced=are_others_reduced)
                self._is_over = records[0].step >= last

    def _take_heads(self) -> tuple[list[StepRecord], dict[int, int]]:
        """Return what is first of each rank, as :func:`parted` does; a record waits where other ranks have dropped."""
        records, dropped = parted([queue[0] for queue in self._queues])
        for queue in self._queues:
            if not dropped or isinstance(queue[0], int):
                queue.pop(0)
        return records, dropped

    def _judge(self, records: list[StepRecord], *, are_others_reduced: bool) -> Iterator[DoctorFinding]:
        assert self._holders is not None
        evidence = Evidence(records, self.starts, self._holders, are_others_reduced)
        yield from self.examination.add(self.examination.judge(evidence, self._ties))
        yield from self.examination.add(self.examination.settle())


class Roots:
    """All further roots, equal on all ranks.

    Args:
        checks: those whose findings count.
        waits: whether findings wait for a later step that may clear them.

    Attributes:
        waits: whether a rank has steps of them to come.
    """

    def __init__(self, checks: Collection[str], *, waits: bool) -> None:
        self.waits = False
        self._idle: list[tuple[str, tuple[str, ...]]] = []
        self._checks, self._are_late = checks, waits
        self._all: dict[Key, Root] = {}

    def __iter__(self) -> Iterator[Root]:
        return iter(self._all.values())

    def keys(self) -> Iterator[Key]:
        """Yield their keys, in the same order."""
        yield from self._all

    def hear(self, tellings: Sequence[Telling]) -> None:
        """Take what each rank tells."""
        self.waits = any(one.waits for one in tellings)
        self._idle = [one for one in tellings[0].idle if all(one in each.idle for each in tellings)]
        for rank, telling in enumerate(tellings):
            for told in telling.roots:
                root = self._all.setdefault(told.key, Root(len(tellings), self._checks, waits=self._are_late))
                root.hear(rank, told)

    def are_reduced(self, *, but: Root | None = None) -> bool:
        """Whether something reduces the gradients of one of them, or of one but for another."""
        return any(start.reducers.names for root in self if root is not but and root.is_of_all for start in root.starts)

    def idle(self, step: int) -> Iterator[DoctorFinding]:
        """D4, after the last step: what is called and gets gradients, which a wrapper reduces, is in an optimizer."""
        for kind, names in self._idle if codes.OPTIMIZED in self._checks else ():
            lines = (
                f"{listed(list(names))}: all {len(names)} parameters that require a gradient get one, which a wrapper "
                "reduces, and are in no optimizer",
                "give its optimizer its own parameters, or set requires_grad=False where it must not move",
            )
            title = "parameters are in no optimizer"
            yield DoctorFinding((codes.OPTIMIZED,), codes.UNMOVED, step, title, lines, root=kind)

    @property
    def seen(self) -> list[Root]:
        """The roots of which a step was judged."""
        return [one for one in self if one.examination.seen]

    @property
    def unseen(self) -> Iterator[str]:
        """Lines of the summary about roots that are not watched."""
        for root in self:
            kind = root.starts[0].name.kind
            if not root.is_of_all:
                yield f"the {kind} that not all ranks train"
            elif any(one.title == reduction.PARTS for one in root.examination.findings):
                yield f"whether ranks have parts or replicas of the {kind}, which differs between them from the start"

    def labels(self, first: Sequence[Start]) -> list[str]:
        """Return how messages name the first root, and further ones."""
        every = [*first[:1], *(root.starts[0] for root in self)]
        return labels(one.name for one in every)


def is_told(finding: DoctorFinding, told: Sequence[DoctorFinding]) -> bool:
    """Whether a finding of a further root is a known one of the whole process, or no finding of one root.

    A root may be given the same on all ranks by design, as positions or a prompt are: then its gradients differ.
    Parameters that differ between ranks from the start may be parts of a model that user code divides.
    """
    if finding.is_note and ({codes.DATA, codes.FINITE} & set(finding.checks) or finding.title == reduction.PARTS):
        return True
    is_of_process = {codes.DATA, codes.FINITE} & set(finding.checks)
    return bool(is_of_process) and any(one.title == finding.title for one in told)


def without_consequences(found: Sequence[tuple[int, DoctorFinding]]) -> Iterator[tuple[int, DoctorFinding]]:
    """Yield findings with the numbers of their roots, but those that follow from another root that is not reduced.

    As of gradients that are clipped by the norm of both.
    """
    causes = {number for number, one in found if one.title == reduction.NOT_REDUCED and not one.is_note}
    for number, one in found:
        if not causes or number in causes or not set(one.checks) <= _OF_REPLICAS:
            yield number, one


def without_seeds(finding: DoctorFinding, told: Sequence[DoctorFinding]) -> DoctorFinding:
    """Return a finding without the line about the seeds of ranks, if another has it."""
    if not any(line.startswith(invariants.SEEDS) for one in told for line in one.lines):
        return finding
    lines = tuple(line for line in finding.lines if not line.startswith(invariants.SEEDS))
    return dataclasses.replace(finding, lines=lines)
