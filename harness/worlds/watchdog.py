"""Diagnosis of a hang: which ranks are stuck, where, and which ranks have not entered the collective they wait in.

The controller runs it after a deadline has passed. It works from outside the ranks, from stack dumps and from the
board, because a stuck rank cannot answer. After a crash the board shows which collectives the ranks had entered.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

from shardproof.harness.collectives.board import Announcement
from shardproof.harness.collectives.trace import without_own_bytes
from shardproof.harness.judging.texts import ranks_of

#: Seconds that ranks may take to write their stack dumps. faulthandler writes in the signal handler, whatever the rank
#: is executing, so only a rank that is stopped or gets no processor time needs longer.
_STACK_SECONDS = 3.0

#: The last collectives of each rank that a report shows; those that ranks share take one line.
_SHOWN_COLLECTIVES = 8

#: The frames at each end of the stack of a rank that waits for another; that of the other is shown whole.
_END_FRAMES = 3

#: Printed where it helps: two ranks were about to enter different collectives.
ADVICE = "the ranks announced different collectives on one group: --check-collectives stops them before they enter"


@dataclasses.dataclass(frozen=True)
class HangDiagnosis:
    """The explanation of a hang, one fact per line, and the rank that the others wait for, if it can be told."""

    rank: int | None
    text: str


def dump_stacks(ranks: Mapping[int, tuple[int, pathlib.Path]]) -> set[int]:
    """Have ranks dump the stacks of their threads to their output files, all at once; return those that did so in time.

    Each rank comes with its process id and the file to which it appends a byte after each complete dump.
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
    """Render a rank's stacks, from what it wrote to its output since the case began.

    A line says that the dump is cut off unless it is complete, and with py-spy installed the native stacks follow.
    """
    text = without_harness(text)
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


def without_harness(text: str) -> str:
    """Remove from stack dumps the frames in which the rank process called the case, which are the same in all dumps."""
    kept, is_below = [], False
    for line in text.splitlines(keepends=True):
        is_below = line.startswith('  File "') and (is_below or _RUNS_A_CASE in line)
        if not is_below:
            kept.append(line)
    return "".join(kept)


def ends_of_stacks(text: str) -> str:
    """Leave of each stack the innermost and the outermost frames: what a rank waits in, and where in the case it is."""
    lines: list[str] = []
    for is_stack, run in itertools.groupby(text.splitlines(), key=lambda line: line.startswith('  File "')):
        frames = list(run)
        left_out = len(frames) - 2 * _END_FRAMES if is_stack else 0
        if left_out > 1:
            frames[_END_FRAMES:-_END_FRAMES] = [f"  ... {left_out} frames left out ..."]
        lines += frames
    return "\n".join(lines)


_RUNS_A_CASE = f'{pathlib.Path(__file__).with_name("loop.py")}", line '


def diagnose(
    entries: Mapping[int, list[Announcement]],
    *,
    stuck: Mapping[int, str],
    case_path: str,
    lost: Mapping[int, str] | None = None,
) -> HangDiagnosis:
    """Determine which rank keeps the ``stuck`` ranks waiting, which did not answer and come with their stack dumps.

    Args:
        entries: for every rank of the world, its announcements during the case, oldest first; none of lost ranks.
        case_path: the case's source file; a frame in it shows where in the case a rank is.
        lost: the ranks that cannot be reached any more, with the reasons. They are to blame.
    """
    if lost:
        reasons: dict[str, list[int]] = {}
        for rank, reason in lost.items():
            reasons.setdefault(reason, []).append(rank)
        return HangDiagnosis(
            min(lost), "\n".join(f"{_are(ranks)} out of reach: {why}" for why, ranks in reasons.items())
        )
    waiting: dict[tuple[str, int, tuple[int, ...], tuple[int, ...], str], list[int]] = {}
    for rank in stuck:
        if missing := _missing(entries[rank], entries):
            last = entries[rank][-1]
            waiting.setdefault((last.group, last.number, last.ranks, missing, last.text), []).append(rank)
    lines = [
        f"{_are(ranks)} in {text}, collective {number} on {ranks_of(members)} (group {group!r}), and {_are(missing)} "
        "missing from it"
        for (group, number, members, missing, text), ranks in waiting.items()
    ]
    culprits = list(dict.fromkeys(rank for _, _, _, missing, _ in waiting for rank in missing))
    # A rank that itself waits in a collective is not the cause of the hang if another missing rank is outside every
    # collective.
    inside = {rank for ranks in waiting.values() for rank in ranks}
    outside = [rank for rank in culprits if rank not in inside]
    suspects = outside or culprits or [rank for rank in stuck if not _missing(entries[rank], entries)] or list(stuck)
    whereabouts: dict[str, list[int]] = {}
    for rank in suspects:
        whereabouts.setdefault(_whereabouts(entries[rank], stuck.get(rank), case_path), []).append(rank)
    lines += [_place(ranks, where) for where, ranks in whereabouts.items()]
    return HangDiagnosis(suspects[0] if suspects else None, "\n".join(lines))


def collectives(entries: Mapping[int, list[Announcement]], unknown: Collection[int] = ()) -> list[str]:
    """Render the last collectives of all ranks, each one once, with the ranks that entered it.

    After a title comes one line for each collective, in an order that agrees with that of every rank, and the advice to
    check collectives if two members of a group announced different ones; nothing if no rank announced any. What
    ``unknown`` ranks announced cannot be read any more.
    """
    entered: dict[Announcement, list[int]] = {}
    order: list[Announcement] = []
    for rank, own in entries.items():
        position = 0
        for entry in own[-_SHOWN_COLLECTIVES:]:
            if entry in entered:
                position = max(position, order.index(entry) + 1)
            else:
                # Behind those that another rank entered in its place.
                while (
                    position < len(order)
                    and order[position].group == entry.group
                    and order[position].number <= entry.number
                ):
                    position += 1
                order.insert(position, entry)
                position += 1
            entered.setdefault(entry, []).append(rank)
    if not order:
        return []
    for entry in order:
        entered[entry] += [rank for rank in entry.ranks if rank not in entered[entry] and _passed(entries[rank], entry)]
    lines = [
        f"  {one.number} on {ranks_of(one.ranks)}: {one.text}, {_by(entered[one], one.ranks, unknown)}" for one in order
    ]
    return ["last collectives, and the ranks that entered them:", *lines, *([ADVICE] if _differ(order) else [])]


def _differ(order: list[Announcement]) -> bool:
    """Whether two members of a group announced different collectives in the same place."""
    places: dict[tuple[str, int, tuple[int, ...]], set[str]] = {}
    for entry in order:
        places.setdefault((entry.group, entry.number, entry.ranks), set()).add(without_own_bytes(entry.text))
    return any(len(texts) > 1 for texts in places.values())


def _passed(own: list[Announcement], entry: Announcement) -> bool:
    """Whether a rank entered a collective longer ago than its lines go back, or announced exactly this one."""
    numbers = [one.number for one in own if one.group == entry.group]
    return entry in own or entry.number < min(numbers, default=0)


def _by(entered: list[int], members: tuple[int, ...], unknown: Collection[int]) -> str:
    if silent := sorted(set(members) & set(unknown)):
        return f"{_by(entered, tuple(set(members) - set(silent)), ())} of those that can be asked"
    others = sorted(set(members) - set(entered))
    if not others:
        return "all"
    return f"all but {ranks_of(others)}" if len(others) < len(entered) else f"{ranks_of(entered)} only"


def _missing(own: list[Announcement], entries: Mapping[int, list[Announcement]]) -> tuple[int, ...]:
    """The members of the group that have not entered the last collective in ``own``."""
    if not own:
        return ()
    last = own[-1]
    numbers = {peer: [entry.number for entry in entries[peer] if entry.group == last.group] for peer in last.ranks}
    return tuple(peer for peer, entered in numbers.items() if max(entered, default=0) < last.number)


def _whereabouts(own: list[Announcement], dump: str | None, case_path: str) -> str:
    """Where a rank is: in which line of the case, and after which collective. ``dump`` is None if it has answered."""
    if dump is None:
        return "has already finished the case" + (f"; its last collective was {own[-1].text}" if own else "")
    frames = [line.strip() for line in dump.splitlines() if line.strip().startswith("File ")]
    in_case = [line for line in frames if case_path in line]
    where = (in_case or frames or ["an unknown line (its stack dump has no frames)"])[0]
    return f"is at {where}" + (f", after {own[-1].text}" if own else ", before the case's first collective")


def _place(ranks: Sequence[int], where: str) -> str:
    verb, _, rest = where.partition(" ")
    return f"{ranks_of(ranks)} {verb if len(ranks) == 1 else {'is': 'are', 'has': 'have'}[verb]} {rest}"


def _are(ranks: Sequence[int]) -> str:
    return f"{ranks_of(ranks)} {'is' if len(ranks) == 1 else 'are'}"
