"""Whether the ranks of a world have done the same in a case, so that they can run another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof.harness.collectives.board import Announcement
from shardproof.harness.collectives.trace import without_own_bytes
from shardproof.harness.verdicts.texts import frames_of
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.harness.worlds.jobs import Result


def by_agreement(results: Sequence[Result]) -> bool:
    """Whether all ranks passed, or all failed by agreement, and none left state behind."""
    passed = all(result.verdict in (Verdict.PASS, Verdict.UNSUPPORTED) for result in results)
    return (passed or all(result.agreed for result in results)) and not any(result.left_behind for result in results)


def failed_alike(results: Sequence[Result]) -> bool:
    """Whether an exception came from the same lines of code on all ranks, and none left state behind."""
    frames = [frames_of(result.text) for result in results]
    raised = all(result.verdict == Verdict.FAIL and not result.agreed for result in results) and all(frames)
    return raised and all(one == frames[0] for one in frames) and not any(result.left_behind for result in results)


def announced_alike(entries: Mapping[int, Sequence[Announcement]]) -> bool:
    """Whether the last collective on each group was the same one for all of its members.

    Args:
        entries: for every rank of the world, its last announcements during the case, oldest first. A group on which a
            rank issued nothing among them counts as one on which its members differ.
    """
    last = {rank: {entry.group: entry for entry in own} for rank, own in entries.items()}
    return all(
        (theirs := last[peer].get(group)) is not None and _identity(theirs) == _identity(entry)
        for own in last.values()
        for group, entry in own.items()
        for peer in entry.ranks
    )


def _identity(entry: Announcement) -> tuple[int, str]:
    return entry.number, without_own_bytes(entry.text)
