"""Announcements: a rank writes each collective to the board before it enters it.

On request (``checking``), a rank also waits until its peers have announced the same collective.

Each collective is announced once, from one of two places: by a Recorder while one is active, which also sees
collectives issued below Python, and otherwise by the methods of ``ProcessGroup``, for collectives that the case, the
baseline and the harness issue outside any Recorder.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from shardproof.harness.collectives.board import Announcement, Board
from shardproof.harness.collectives.trace import Collective, without_own_bytes
from shardproof.harness.judging.finding import Divergence, Location, Stage
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.tensors.trees import tensors_of

#: Methods of ``ProcessGroup`` across torch versions, by the kind of collective that they issue.
METHODS = {
    "all_gather": (
        "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather", "gather_single", "gather_into_tensor"),
    "scatter": ("scatter",),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "send": ("send",),
    "recv": ("recv", "recv_anysource"),
    "barrier": ("barrier", "monitored_barrier"),
}  # fmt: skip
_POINT_TO_POINT = ("send", "recv")

#: Kinds that combine the values of the ranks with an operator, and how a kind with a root is named with it.
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}


class Announcer:
    """Writes the announcements of this process to the world's board, as those of a global rank.

    Attributes:
        job: the number of the current job, which all ranks of the world have in common.
        operator: the operator of the reduction that a method of ``ProcessGroup`` is about to issue, for a Recorder, as
            dispatch passes it on as an opaque object. Empty outside of such a method, as for DDP's own reducer.
    """

    def __init__(self, board: Board, *, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._numbers: collections.Counter[str] = collections.Counter()
        self.job = 0
        self._checking = False
        self._patience = 0.0
        self._depth = 0
        self._recorders = 0
        self.operator = ""
        self._listener: Callable[[Collective], None] | None = None
        self._world = ""
        self._world_ranks: tuple[int, ...] | None = None
        self._silent: set[str] = set()

    def start_job(self, job: int, *, checking: bool, patience: float) -> None:
        """Start a job, in which collectives are numbered anew.

        While checking, each announcement is compared with those of the peers before the collective is entered; for
        those of one collective a rank waits ``patience`` seconds.
        """
        self._numbers.clear()
        self.job, self._checking, self._patience = job, checking, patience

    def announce(self, group: dist.ProcessGroup, kind: str, text: str) -> None:
        """Announce that this rank is about to enter a collective of a group.

        While checking, the text is compared between the members of the group; "send" and "recv" are never checked.

        Raises:
            Divergence: while checking, if a member announced a different collective; every member raises it.
        """
        name = f"{self._world}{group.group_name}"
        self._numbers[name] += 1
        ranks = tuple(dist.get_process_group_ranks(group))
        if self._world_ranks is not None:
            ranks = tuple(self._world_ranks[one] for one in ranks)
        entry = Announcement(self.job, self._numbers[name], name, ranks, text)
        self._board.post(self._rank, entry)
        if self._checking and kind not in _POINT_TO_POINT:
            self._meet(entry)

    def _meet(self, entry: Announcement) -> None:
        """Wait until all members of the group have announced this collective.

        No rank enters the collective before that, so that no rank is left inside it when the announcements differ. A
        member that announces nothing in time is passed over.
        """
        until = time.monotonic() + self._patience
        for peer in entry.ranks:
            theirs = self._await(peer, entry, until)
            if theirs is not None and without_own_bytes(theirs.text) != without_own_bytes(entry.text):
                lines = [f"collective {entry.number} on {ranks_of(entry.ranks)} differs between ranks"]
                lines += [f"  rank {who}: {self._sequence(who, entry)}" for who in (entry.ranks[0], self._rank, peer)]
                raise Divergence("\n".join(dict.fromkeys(lines)), Location(stage=Stage.COLLECTIVES, rank=peer))

    def _await(self, peer: int, entry: Announcement, until: float) -> Announcement | None:
        while time.monotonic() < until:
            for theirs in reversed(self._board.entries(peer, job=entry.job)):
                if (theirs.group, theirs.number) == (entry.group, entry.number):
                    return theirs
            time.sleep(2e-5)
        return None

    def _sequence(self, rank: int, entry: Announcement) -> str:
        same = [one for one in self._board.entries(rank, job=entry.job) if one.group == entry.group]
        return " | ".join(f"{one.number} {one.text}" for one in same[-4:])

    @contextlib.contextmanager
    def left_to_a_recorder(self) -> Iterator[None]:
        """Suspend the announcements of the methods of ``ProcessGroup``, because a Recorder makes them.

        This applies to all threads: the state is a counter and not thread-local, because backward on a device runs on
        threads of its own.
        """
        self._recorders += 1
        try:
            yield
        finally:
            self._recorders -= 1

    @contextlib.contextmanager
    def in_another_world(self, name: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """Announce the collectives of another world, of which this process is a rank for as long as the context lasts.

        The name tells its groups from those of other worlds, which may have the same names. ``ranks`` has, by rank of
        the other world, the rank of this one that it is.
        """
        before = self._world, self._world_ranks
        self._world, self._world_ranks = f"{name}/", ranks
        try:
            yield
        finally:
            self._world, self._world_ranks = before

    @contextlib.contextmanager
    def passing_over(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Announce no collective of a group that another thread uses, as that of a save in the background."""
        self._silent.add(str(group.group_name))
        try:
            yield
        finally:
            self._silent.remove(str(group.group_name))

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[Collective], None], *, phase: str) -> Iterator[None]:
        """Pass on each collective that the methods of ``ProcessGroup`` issue in this context, before it is issued.

        It serves where no Recorder may be active, and misses what is issued below Python, as by DDP's reducer. The
        collectives belong to ``phase``.
        """
        before = self._listener
        self._listener = lambda collective: listener(dataclasses.replace(collective, phase=phase))
        try:
            yield
        finally:
            self._listener = before

    def watch_process_groups(self) -> None:
        """Patch the methods of ``ProcessGroup`` to announce collectives, for the rest of the process."""
        for kind, names in METHODS.items():
            for name in names:
                if (method := getattr(dist.ProcessGroup, name, None)) is not None:
                    setattr(dist.ProcessGroup, name, self._announcing(method, kind))

    def _announcing(self, method: Callable[..., Any], kind: str) -> Any:
        @functools.wraps(method)
        def announcing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._silent and str(group.group_name) in self._silent:
                return method(group, *args, **kwargs)
            # torch 2.13 implements the old method names with the new ones, so that calls nest: only the outermost call
            # is a collective of its own.
            if self._depth == 0:
                self.operator = _operator_of(kind, [*args, *kwargs.values()])
                if not self._recorders:
                    self.announce(group, kind, _describe(group, kind, args, kwargs))
                    if self._listener is not None:
                        self._listener(collective_of(group, kind, args, kwargs))
            self._depth += 1
            try:
                return method(group, *args, **kwargs)
            finally:
                self._depth -= 1
                self.operator = self.operator if self._depth else ""

        return announcing


def full_kind(kind: str, *, operator: str, root: int | None) -> str:
    """Name a collective with what all ranks must agree on: "all_reduce sum", "broadcast from rank 0".

    The operator is empty where it is not known; the root is a global rank, of the kinds that have one.
    """
    parts = [kind, operator if kind in _REDUCTIONS else ""]
    parts += [f"{_ROOTED[kind]} rank {root}"] if kind in _ROOTED and root is not None else []
    return " ".join(filter(None, parts))


def _describe(group: dist.ProcessGroup, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    values = [*args, *kwargs.values()]
    root = _root_of(group, values) if kind in _ROOTED else None
    name = full_kind(kind, operator=_operator_of(kind, values), root=root)
    one = collective_of(group, kind, args, kwargs)
    return f"{name} {one.dtype} {one.nbytes} B" if one.dtype else name


def collective_of(group: dist.ProcessGroup, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective:
    """Return what a method of ``ProcessGroup`` issues, from its arguments, without phase and unit."""
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = list(tensors_of([list(args), kwargs]))
    if not tensors:
        return Collective("", kind, "", 0, ranks)
    # The largest tensor is the unsharded side of a gather or a reduction.
    largest = max(tensors, key=lambda tensor: tensor.numel())
    return Collective(
        "", kind, str(largest.dtype).removeprefix("torch."), largest.numel() * largest.element_size(), ranks,
        operator=_operator_of(kind, [*args, *kwargs.values()]),
    )  # fmt: skip


def _operator_of(kind: str, values: list[Any]) -> str:
    """The name of a reduction's operator, which is an argument of its own or a field of the options."""
    if kind not in _REDUCTIONS:
        return ""
    for value in values:
        operator = getattr(value, "reduceOp", value)
        # A ReduceOp holds the member of the enumeration, and for PREMUL_SUM a factor, which may differ between ranks.
        operator = getattr(operator, "op", operator) if isinstance(operator, dist.ReduceOp) else operator
        if isinstance(operator, dist.ReduceOp.RedOpType):
            return str(operator.name).lower()
    return "sum"  # the default of all methods


def _root_of(group: dist.ProcessGroup, values: list[Any]) -> int:
    """The global rank of the root, whose number in the group is an argument of its own or a field of the options."""
    roots = [root for value in values if type(root := getattr(value, "rootRank", value)) is int]
    return dist.get_process_group_ranks(group)[roots[0] if roots else 0]
