"""The verdicts, and how what several ranks say becomes one of them."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Verdict(enum.StrEnum):
    """The verdict on one case; where ranks differ, the first of this order wins."""

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
        """Whether the verdict says only that something is missing."""
        return self in (Verdict.UNMET, Verdict.UNSUPPORTED)

    @property
    def is_good(self) -> bool:
        """Whether a run with this verdict may still pass."""
        return self.is_skip or self in (Verdict.PASS, Verdict.EXPECTED_FAIL)


_ORDER = {verdict: position for position, verdict in enumerate(Verdict)}


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a case whose ranks said ``verdicts``.

    A skip on some ranks only is a failure: the ranks did not run the same case.

    Raises:
        ValueError: there is no verdict to combine.
    """
    said = set(verdicts)
    if not said:
        raise ValueError("no rank said anything")
    worst = min(said, key=_ORDER.__getitem__)
    if worst.is_skip and len(said) > 1:
        return Verdict.FAIL
    return worst
