"""The verdicts, and how the verdicts of several ranks become one."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Verdict(enum.StrEnum):
    """The verdict on one case; where ranks differ, the first in this order wins."""

    HARNESS_ERROR = "harness-error"
    CRASH = "crash"
    FAIL = "fail"
    HANG = "hang"
    UNMET = "unmet"
    UNSUPPORTED = "unsupported"
    EXPECTED_FAIL = "expected-fail"
    UNEXPECTED_PASS = "unexpected-pass"
    PASS = "pass"

    @property
    def is_skip(self) -> bool:
        """Whether the case did not run because a capability or hardware is missing."""
        return self in (Verdict.UNMET, Verdict.UNSUPPORTED)


_ORDER = {verdict: position for position, verdict in enumerate(Verdict)}


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a case from the verdicts of its ranks.

    A skip on some ranks only is a failure: the ranks did not run the same case.

    Args:
        verdicts: one of each rank, in any order.

    Returns:
        The gravest of them, or ``FAIL`` where that is a skip and another rank has another verdict.

    Raises:
        ValueError: there is no verdict to combine.
    """
    found = set(verdicts)
    if not found:
        raise ValueError("no rank has a verdict")
    worst = min(found, key=_ORDER.__getitem__)
    if worst.is_skip and len(found) > 1:
        return Verdict.FAIL
    return worst
