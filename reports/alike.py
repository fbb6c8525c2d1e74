"""Which failures of a run are alike, so that one of them stands for all."""

import re
from collections.abc import Iterable

from shardproof.reports.record import CaseRecord

_TRACEBACK = "Traceback (most recent call last)"
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_NUMBERS = re.compile(r"-?\b\d[\d.]*(e[+-]?\d+)?\b(, -?\d+)*")


def alike(cases: Iterable[CaseRecord]) -> list[list[CaseRecord]]:
    """Group the failures that are alike, in the order of their first cases.

    Failures are alike if they have the same implementation, verdict and text. The numbers and names of a comparison may
    differ, as they do from case to case; a traceback must be the same but for addresses.

    Args:
        cases: the records of failed cases.
    """
    groups: dict[object, list[CaseRecord]] = {}
    for case in cases:
        text = case.failure.text if case.failure is not None else None
        if text is not None and case.explanation is not None:
            # Two cases that fail alike may first diverge in different places.
            text = text.removesuffix(case.explanation.text)
        kind = id(case) if text is None else (case.implementation, case.verdict, _kind(text))
        groups.setdefault(kind, []).append(case)
    return list(groups.values())


def _kind(text: str) -> str:
    text = _ADDRESS.sub("0x*", text)
    return text if _TRACEBACK in text else _NUMBERS.sub("#", _QUOTED.sub("'...'", text))
