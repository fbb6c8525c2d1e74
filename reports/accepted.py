"""Regressions that a change intends: a file of TOML that `shardproof gate --accept` reads."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardproof import door, renamed
from shardproof.door import BadFile
from shardproof.reports.regressions import Accepted, RegressionKind, RunComparison, Worse

_FIELDS = ("implementation", "case", "kind", "reason")

#: Kinds of regression that concern a whole implementation and name no case.
_WITHOUT_CASE = (RegressionKind.BUDGET, RegressionKind.SILENT, RegressionKind.TIME)


@dataclass(frozen=True)
class Acceptance:
    """One entry of the file."""

    implementation: str
    # An ``fnmatch`` pattern for the ids of cases, in which brackets are literal; empty where a kind concerns a whole
    # implementation.
    case: str
    kind: RegressionKind
    reason: str  # why it is intended
    where: str  # the file and the number of the entry, for messages

    def matches(self, one: Worse) -> bool:
        """Whether the entry accepts a regression."""
        pattern = self.case.replace("[", "[[]")
        return (
            (one.implementation, one.kind) == (self.implementation, self.kind)
            and bool(one.case) == bool(self.case)
            and fnmatch.fnmatchcase(one.case, pattern)
        )


def load(path: str) -> list[Acceptance]:
    """Read a file of accepted regressions.

    Raises:
        BadFile: it cannot be read, or an entry is not valid.
    """
    data = door.toml(path)
    entries = data.get("accept", [])
    if data.keys() - {"accept"} or not isinstance(entries, list):
        raise BadFile(f"{path}: expected entries [[accept]] and nothing else, not {', '.join(data)}")
    return [_acceptance(entry, f"{path}: entry {number}") for number, entry in enumerate(entries, 1)]


def accept(outcome: RunComparison, entries: Sequence[Acceptance]) -> RunComparison:
    """Move accepted regressions out of those that count.

    Raises:
        BadFile: an entry matches no regression.
    """
    accepted = {one: entry for one in outcome.worse for entry in entries if entry.matches(one)}
    for entry in entries:
        if not any(entry.matches(one) for one in outcome.worse):
            what = f"{entry.implementation} {entry.case}".rstrip()
            raise BadFile(f"{entry.where}: no {entry.kind.value!r} of {what} in this comparison; remove it")
    rest = tuple(one for one in outcome.worse if one not in accepted)
    return replace(outcome, worse=rest, accepted=tuple(Accepted(one, entry.reason) for one, entry in accepted.items()))


def _acceptance(entry: object, where: str) -> Acceptance:
    if not isinstance(entry, dict):
        raise BadFile(f"{where}: expected a table")
    if unknown := sorted(entry.keys() - set(_FIELDS)):
        raise BadFile(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(_FIELDS)}")
    for name in _FIELDS:
        if name != "case" and not (isinstance(entry.get(name), str) and entry[name].strip()):
            raise BadFile(f"{where}: {name} must be a text that is not empty")
    kind = _kind(entry["kind"], where)
    case = entry.get("case", "")
    if not isinstance(case, str) or bool(case) == (kind in _WITHOUT_CASE):
        wanted = "no case, since it concerns the implementation" if kind in _WITHOUT_CASE else "a pattern of cases"
        raise BadFile(f"{where}: {kind.value!r} needs {wanted}")
    return Acceptance(entry["implementation"], renamed.item(case), kind, entry["reason"].strip(), where)


def _kind(name: str, where: str) -> RegressionKind:
    try:
        return RegressionKind(name)
    except ValueError:
        raise BadFile(f"{where}: kind {name!r} is not one of {', '.join(RegressionKind)}") from None
