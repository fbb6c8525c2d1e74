"""Known failures that pass now: by pattern, in which versions of torch, and how to bound the entry."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardproof.door import BadFile, printable
from shardproof.runfile import CaseRecord, KnownFailure, Run, Verdict

_BOUND = "bound with torch = "

_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})")

Release = tuple[int, int]


@dataclass
class _Entry:
    """One pattern of an entry, with the cases to which it was applied by the release of torch of their run."""

    known: KnownFailure
    cases: dict[Release, list[CaseRecord]] = field(default_factory=dict)


def check(runs: Mapping[str, Run]) -> list[str]:
    """Find the known failures that need a change: those whose cases pass, and those that the runs report.

    Takes complete runs, of one version of torch each, by the path of their file. Returns one text for each pattern.

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
    #: With which version the cases of an entry begin to pass, by pattern.
    begins: dict[KnownFailure, set[Release | None]] = {}
    for entry in entries.values():
        begins.setdefault(replace(entry.known, case=""), set()).add(next(iter(_divided(entry)[0]), None))
    found = []
    for entry in entries.values():
        if advice := _advice(entry, oldest, newest):
            differs = advice.startswith(_BOUND) and len(begins[replace(entry.known, case="")]) > 1
            found.append(_text(entry, advice + "; divide the entry: its other patterns differ" * differs))
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


def _passing(entry: _Entry) -> dict[Release, list[CaseRecord]]:
    return {
        release: [case for case in cases if case.verdict is Verdict.UNEXPECTED_PASS]
        for release, cases in entry.cases.items()
    }


def _divided(entry: _Entry) -> tuple[list[Release], list[Release]]:
    """The versions with which all cases pass, and the others."""
    passing = _passing(entry)
    whole = sorted(release for release, cases in passing.items() if len(cases) == len(entry.cases[release]))
    return whole, sorted(entry.cases.keys() - whole)


def _text(entry: _Entry, advice: str) -> str:
    """The change that an entry needs, with what it follows from."""
    passing, (whole, failing) = _passing(entry), _divided(entry)
    facts = [f"passes with torch {_shown(whole)}"] if whole else []
    for release in failing:
        if passing[release]:
            which = ", ".join(f"{case.id} on {case.implementation}" for case in passing[release])
            facts.append(f"with torch {_shown([release])} passes in part: {which}")
        else:
            facts.append(f"fails with torch {_shown([release])}")
    names = dict.fromkeys(case.implementation for cases in entry.cases.values() for case in cases)
    lines = [f"{entry.known.source}, {entry.known.link}: {entry.known.case}"]
    lines += [f"  {', '.join(names)}: {'; '.join(facts)}", f"  {advice}"]
    return "\n".join(map(printable, lines))


def _advice(entry: _Entry, oldest: Release, newest: Release) -> str:
    """Say how to bound an entry, and which versions the runs leave open; empty if all its cases fail."""
    if not any(_passing(entry).values()):
        return ""
    whole, failing = _divided(entry)
    if not whole:
        return "divide the entry: a bound is for all of its cases"
    if failing and failing[-1] > whole[0]:
        return f"no upper bound fits: torch {_shown(failing[-1:])} is newer than {_shown(whole[:1])}"
    bound = f"<{_shown(whole[:1])}"
    advice = f'{_BOUND}"{entry.known.torch + "," if entry.known.torch else ""}{bound}"'
    if whole[0] == oldest:
        advice += ", or by an older version: no run has one"
    if whole[-1] < newest:
        advice += f"; no case of it ran with torch {_shown([newest])}"
    return advice


def _shown(releases: Iterable[Release]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in releases)
