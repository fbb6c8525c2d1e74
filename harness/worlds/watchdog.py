"""Diagnosis of a hang: which ranks are stuck, where, and which ranks have not entered the collective they wait in.

The controller runs it after a deadline has passed. It works from outside the ranks, from stack dumps and from the
board, because a stuck rank cannot answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping

from shardproof.harness.collectives.board import Announcement

#: Seconds that ranks may take to write their stack dumps. faulthandler writes in the signal handler, whatever the rank
#: is executing, so only a rank that is stopped or gets no processor time needs longer.
_STACK_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The explanation of a hang.

    Attributes:
        rank: the global rank that the others wait for, or None if it cannot be determined.
        text: the explanation for the report, one fact per line.
    """

    rank: int | None
    text: str


def dump_stacks(ranks: Mapping[int, tuple[int, pathlib.Path]]) -> set[int]:
    """Have ranks dump the Python stacks of their threads to their output files, all at once, and wait for the dumps.

    Args:
        ranks: by global rank, its process id and the file to which it appends a byte after each complete dump.

    Returns:
        The ranks whose dumps are complete. The others did not finish in time.
    """
    before = {rank: _size(dumped) for rank, (_, dumped) in ranks.items()}
    for pid, _ in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + _STACK_SECONDS
    while True:
        complete = {rank for rank, (_, dumped) in ranks.items() if _size(dumped) > before[rank]}
        if len(complete) == len(ranks) or time.monotonic() >= until:
            return complete
        time.sleep(0.01)


def stacks(pid: int, text: str, *, is_complete: bool) -> str:
    """Render a rank's stacks.

    Args:
        pid: the rank's process id.
        text: what the rank wrote to its output since the case began, with the Python stacks.
        is_complete: whether the rank finished the dump.

    Returns:
        The text, a line that the dump is cut off unless it is complete, and with py-spy installed the native stacks.
    """
    end = "" if is_complete else f"(cut off: the rank did not finish its stack dump within {_STACK_SECONDS:g} s)\n"
    return text + end + _native_stacks(pid)


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _native_stacks(pid: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return ""
    command = [spy, "dump", "--native", "--pid", str(pid)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "py-spy timed out\n"
    return f"native stacks:\n{completed.stdout or completed.stderr}"


def diagnose(entries: Mapping[int, list[Announcement]], *, stuck: Mapping[int, str], case_path: str) -> Diagnosis:
    """Determine which rank keeps the stuck ranks waiting.

    Args:
        entries: for every rank of the world, its announcements during the case, oldest first.
        stuck: the ranks that did not answer, with their stack dumps.
        case_path: the case's source file; a frame in it shows where in the case a rank is.
    """
    lines, culprits = [], []
    for rank in stuck:
        last = entries[rank][-1] if entries[rank] else None
        missing = [] if last is None else [peer for peer in last.ranks if _entered(entries[peer], last) < last.number]
        if last is None or not missing:
            continue
        culprits += [peer for peer in missing if peer not in culprits]
        lines.append(
            f"rank {rank} is in {last.text}, collective {last.number} on ranks {list(last.ranks)} "
            f"(group {last.group!r}), and {_listed(missing)} missing from it"
        )
    # A rank that itself waits in a collective is not the cause of the hang if another missing rank is outside every
    # collective.
    outside = [rank for rank in culprits if not any(line.startswith(f"rank {rank} is in ") for line in lines)]
    suspects = outside or culprits or [rank for rank in stuck if not _waits(entries[rank], entries)] or list(stuck)
    for rank in suspects:
        lines.append(f"rank {rank} {_whereabouts(rank, entries[rank], stuck, case_path)}")
    lines += [_tail(rank, own) for rank, own in entries.items() if own]
    return Diagnosis(suspects[0] if suspects else None, "\n".join(lines))


def _entered(entries: list[Announcement], last: Announcement) -> int:
    """Return the number of the last collective that a rank entered on the group of ``last``, 0 if it entered none."""
    return max((entry.number for entry in entries if entry.group == last.group), default=0)


def _waits(own: list[Announcement], entries: Mapping[int, list[Announcement]]) -> bool:
    """Whether some member of the group has not entered the last collective in ``own``."""
    return bool(own) and any(_entered(entries[peer], own[-1]) < own[-1].number for peer in own[-1].ranks)


def _whereabouts(rank: int, own: list[Announcement], stuck: Mapping[int, str], case_path: str) -> str:
    if rank not in stuck:
        return "has already finished the case" + (f"; its last collective was {own[-1].text}" if own else "")
    frames = [line.strip() for line in stuck[rank].splitlines() if line.strip().startswith("File ")]
    in_case = [line for line in frames if case_path in line]
    where = (in_case or frames or ["an unknown line (its stack dump has no frames)"])[0]
    return f"is at {where}" + (f", after {own[-1].text}" if own else ", before any collective of the case")


def _tail(rank: int, entries: list[Announcement]) -> str:
    shown = "".join(f"\n    {entry.number} on ranks {list(entry.ranks)}: {entry.text}" for entry in entries)
    return f"  last collectives of rank {rank}:{shown}"


def _listed(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"
