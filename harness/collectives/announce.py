"""A rank says which collective it is about to enter, and, on request, waits for its peers to say the same.

Two places announce, each collective once: a Recorder, for what is issued below Python, and methods
of ``ProcessGroup``, for what the case, the baseline and the harness issue outside any Recorder.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from shardproof.harness.collectives.board import Announcement, Board
from shardproof.harness.findings.finding import Divergence, Location
from shardproof.harness.findings.stages import Stage
from shardproof.harness.tensors.trees import tensors_of

_METHODS = {
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
_POINT_TO_POINT = ("send", "recv")


class Announcer:
    """One rank's side of the board."""

    def __init__(self, board: Board, *, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._numbers: collections.Counter[str] = collections.Counter()
        self._job = 0
        self._checking = False
        self._patience = 0.0
        self._depth = 0
        self._recorders = 0

    def start_job(self, job: int, *, checking: bool, patience: float) -> None:
        """Count from the start; while ``checking``, wait at most ``patience`` seconds for peers."""
        self._numbers.clear()
        self._job, self._checking, self._patience = job, checking, patience

    def announce(self, group: dist.ProcessGroup, kind: str, text: str) -> None:
        """Say that this rank enters a collective.

        Raises:
            Divergence: while checking, on every member, if one announced another collective instead.
        """
        name = str(group.group_name)
        self._numbers[name] += 1
        ranks = tuple(dist.get_process_group_ranks(group))
        entry = Announcement(self._job, self._numbers[name], name, ranks, text)
        self._board.post(self._rank, entry)
        if self._checking and kind not in _POINT_TO_POINT:
            self._meet(entry)

    def _meet(self, entry: Announcement) -> None:
        """Nobody enters before all members said the same, so nobody is left inside."""
        until = time.monotonic() + self._patience
        for peer in entry.ranks:
            theirs = self._await(peer, entry, until)
            if theirs is not None and theirs.text != entry.text:
                lines = [f"collective {entry.number} on ranks {list(entry.ranks)} differs between ranks"]
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
        """Inside, methods of ``ProcessGroup`` announce nothing, on any thread: a Recorder does.

        Counted and not kept per thread, because backward on a device runs on threads of its own.
        """
        self._recorders += 1
        try:
            yield
        finally:
            self._recorders -= 1

    def watch_process_groups(self) -> None:
        """Announce from the methods of ``ProcessGroup`` too, for the rest of the process."""
        for name, kind in _METHODS.items():
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:
                setattr(dist.ProcessGroup, name, self._announcing(method, kind))

    def _announcing(self, method: Callable[..., Any], kind: str) -> Any:
        @functools.wraps(method)
        def announcing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            # 2.13 implements old names by new ones: the outermost of nested calls is the collective.
            if self._depth == 0 and not self._recorders:
                self.announce(group, kind, _describe(kind, args, kwargs))
            self._depth += 1
            try:
                return method(group, *args, **kwargs)
            finally:
                self._depth -= 1

        return announcing


def _describe(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    tensors = list(tensors_of([list(args), kwargs]))
    if not tensors:
        return kind
    # The largest: of a gather's or a reduction's two sides, the unsharded one.
    largest = max(tensors, key=lambda tensor: tensor.numel())
    return f"{kind} {str(largest.dtype).removeprefix('torch.')} {largest.numel() * largest.element_size()} B"
