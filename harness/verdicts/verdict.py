"""The verdicts, and how the verdicts of several ranks are combined."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Verdict(enum.StrEnum):
    """The verdict on one case, most severe first: where ranks differ, the first in this order wins."""

    HARNESS_ERROR = "harness-error"
    """The harness could not run the case."""

    CRASH = "crash"
    """The process of a rank ended."""

    FAIL = "fail"
    """The case raised, or it left something behind in the process of a rank."""

    HANG = "hang"
    """A rank did not finish before the deadline, or soon after another rank had failed."""

    UNMET = "unmet"
    """Skipped: the host lacks hardware that the case needs."""

    UNSUPPORTED = "unsupported"
    """Skipped: the implementation lacks a capability that the case needs."""

    EXPECTED_FAIL = "expected-fail"
    """The case failed as expected."""

    UNEXPECTED_PASS = "unexpected-pass"
    """The case passed although it was expected to fail."""

    PASS = "pass"
    """The case passed on every rank."""

    @property
    def is_skip(self) -> bool:
        """Whether the case did not run because a capability or hardware is missing."""
        return self in (Verdict.UNMET, Verdict.UNSUPPORTED)

    @property
    def fails(self) -> bool:
        """Whether the verdict fails the run."""
        return self not in (Verdict.PASS, Verdict.EXPECTED_FAIL) and not self.is_skip


_ORDER = {verdict: position for position, verdict in enumerate(Verdict)}


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine the verdicts of all ranks to the verdict of the case.

    A skip on some ranks only is a failure, because the ranks did not run the same case.

    Args:
        verdicts: the verdict of each rank, in any order.

    Returns:
        The most severe verdict; ``FAIL`` if that is a skip and any rank has a different verdict.

    Raises:
        ValueError: there are no verdicts.
    """
    found = set(verdicts)
    if not found:
        raise ValueError("no rank has a verdict")
    worst = min(found, key=_ORDER.__getitem__)
    if worst.is_skip and len(found) > 1:
        return Verdict.FAIL
    return worst
