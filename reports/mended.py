"""Known failures that pass now: by entry, in which versions of torch, and how to bound the entry."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardproof.door import BadFile, printable
from shardproof.runfile import CaseRecord, KnownFailure, Run, Verdict

_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})")

Release = tuple[int, int]


@dataclass
class _Entry:
    """One entry with the cases to which it was applied, by the release of torch of their run."""

    known: KnownFailure
    cases: dict[Release, list[CaseRecord]] = field(default_factory=dict)


def check(runs: Mapping[str, Run]) -> list[str]:
    """Find the known failures that need a change: those whose cases pass, and those that the runs report.

    Takes complete runs, of one version of torch each, by the path of their file. Returns one text for each entry.

    Raises:
        BadFile: a run is incomplete, merged, or does not name its version of torch. The message is one line.
    """
    entries: dict[tuple[str, str, str], _Entry] = {}
    unnamed, problems = [], []
    releases = {path: _release(path, run) for path, run in runs.items()}
    for path, run in sorted(runs.items(), key=lambda item: releases[item[0]]):
        problems += [problem for problem in run.end.problems if problem not in problems]
        for case in run.cases:
            known = case.known_failure
            if known is not None:
                # Not by its number, which changes from commit to commit.
                entry = entries.setdefault((known.source.partition(" ")[0], known.case, known.link), _Entry(known))
                entry.known = known
                entry.cases.setdefault(releases[path], []).append(case)
            elif case.verdict is Verdict.UNEXPECTED_PASS:
                unnamed.append(f"{case.id} passes on {case.implementation}; {path} names no entry: {_told(case)}")
    newest, oldest = max(releases.values()), min(releases.values())
    found = [text for entry in entries.values() if (text := _text(entry, oldest, newest))]
    return [*found, *map(printable, [*unnamed, *problems])]


def _release(path: str, run: Run) -> Release:
    """Return the release of torch of a run, after a check that its file can be used."""
    if run.incomplete:
        raise BadFile(f"{path} is incomplete ({run.incomplete}): which known failures pass is not known")
    if run.merged:
        raise BadFile(f"{path} is a merged file: give the files that it was made of")
    release = _RELEASE.match(run.environment.torch)
    if release is None:
        raise BadFile(f"{path} has torch {run.environment.torch!r}, which is not a version number")
    return int(release[1]), int(release[2])


def _told(case: CaseRecord) -> str:
    """The last line of a failure's text, which is about the entry."""
    lines = case.failure.text.splitlines() if case.failure is not None else []
    return lines[-1] if lines else "no text"


def _text(entry: _Entry, oldest: Release, newest: Release) -> str:
    """The change that an entry needs; empty if all its cases fail."""
    passing = {
        release: [case for case in cases if case.verdict is Verdict.UNEXPECTED_PASS]
        for release, cases in entry.cases.items()
    }
    if not any(passing.values()):
        return ""
    whole = sorted(release for release, cases in passing.items() if len(cases) == len(entry.cases[release]))
    failing = sorted(entry.cases.keys() - whole)
    facts = [f"passes with torch {_shown(whole)}"] if whole else []
    lines = [f"{entry.known.source}, {entry.known.link}: {entry.known.case}"]
    for release in failing:
        if passing[release]:
            which = ", ".join(f"{case.id} on {case.implementation}" for case in passing[release])
            facts.append(f"with torch {_shown([release])} passes in part: {which}")
        else:
            facts.append(f"fails with torch {_shown([release])}")
    names = dict.fromkeys(case.implementation for cases in entry.cases.values() for case in cases)
    lines.append(f"  {', '.join(names)}: {'; '.join(facts)}")
    lines.append(f"  {_advice(entry, whole, failing, oldest, newest)}")
    return "\n".join(map(printable, lines))


def _advice(
    entry: _Entry, whole: Sequence[Release], failing: Sequence[Release], oldest: Release, newest: Release
) -> str:
    """Say how to bound an entry, and which versions the runs leave open."""
    if not whole:
        return "divide the entry: a bound is for all of its cases"
    if failing and failing[-1] > whole[0]:
        return f"no upper bound fits: torch {_shown(failing[-1:])} is newer than {_shown(whole[:1])}"
    bound = f"<{_shown(whole[:1])}"
    advice = f'bound with torch = "{entry.known.torch + "," if entry.known.torch else ""}{bound}"'
    if whole[0] == oldest:
        advice += ", or by an older version: no run has one"
    if whole[-1] < newest:
        advice += f"; no case of it ran with torch {_shown([newest])}"
    return advice


def _shown(releases: Iterable[Release]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in releases)
