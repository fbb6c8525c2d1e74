"""What an implementation is known to get wrong: ``suites/expectations/<implementation>.toml``, read and applied.

An entry names cases and the verdict that they are expected to have::

    [[expect]]
    case = "suites/test_clipping.py::test_empty_shards[w4-*]"
    verdict = "fail"
    reason = "the inf-norm of an empty shard raises"
    link = "docs/findings.md#f-2"
    torch = ">=2.11,<2.14"
    device = "cuda"
    expires = 2027-06-30

``case`` is a pattern of ``fnmatch`` over a case's id, in which brackets stand for themselves; an id names no
implementation. ``torch``, ``device`` and ``expires`` may be left out: an entry about other versions or another type of
device says nothing. An entry excuses what it says and nothing else: a case that
passes all the same, an entry that has expired and one that matches no case each fail the run.

Imports no torch until cases were collected.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import pathlib
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from shardproof.harness.findings.verdict import Verdict
from shardproof.harness.plugin import cases
from shardproof.harness.plugin.records import CaseRecord
from shardproof.harness.plugin.selection import Selection

FOLDER = "expectations"
"""Where the files are: in this folder beside a case's own file."""

#: What can be expected of a case; anything else either is no failure or says nothing about the implementation.
_EXPECTABLE = (Verdict.FAIL, Verdict.HANG, Verdict.CRASH)

_REQUIRED = {"case", "verdict", "reason", "link"}
_OPTIONAL = {"torch", "device", "expires"}
_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """One expectation, checked; ``source`` is the file and the entry's number in it."""

    case: str
    verdict: Verdict
    reason: str
    link: str
    torch: SpecifierSet
    device: str | None
    expires: datetime.date | None
    source: str

    def matches(self, case_id: str) -> bool:
        """Whether the entry is about this case."""
        return fnmatch.fnmatchcase(case_id, self.case.replace("[", "[[]"))

    def applies_to(self, torch_version: str, device: str) -> bool:
        """Whether the entry is about this type of device and this version of torch, whatever its local build."""
        version = torch_version.partition("+")[0]
        return self.device in (None, device) and self.torch.contains(version, prereleases=True)

    def has_expired(self, today: datetime.date) -> bool:
        """Whether the last day on which it excuses anything is past."""
        return self.expires is not None and today > self.expires


class KnownFailures:
    """The entries of one implementation that apply to one version of torch and one type of device.

    Say every case's verdict to :meth:`judge`, then ask for :meth:`problems`.
    """

    def __init__(
        self, entries: Iterable[KnownFailure], *, torch_version: str, device: str, today: datetime.date
    ) -> None:
        self._entries = [entry for entry in entries if entry.applies_to(torch_version, device)]
        self._today = today

    def judge(self, case_id: str, verdict: Verdict) -> tuple[Verdict, str]:
        """The verdict in the light of what was expected, and why it changed ("" if it did not).

        A skip is left alone: what is missing was not tried. A failure of another kind than the expected one stays a
        failure.
        """
        entry = next((entry for entry in self._entries if entry.matches(case_id)), None)
        if entry is None or verdict.is_skip or entry.has_expired(self._today):
            return verdict, ""
        if verdict == entry.verdict:
            return Verdict.EXPECTED_FAIL, f"{entry.reason} ({entry.link})"
        if verdict == Verdict.PASS:
            return Verdict.UNEXPECTED_PASS, f"passes, and {entry.source} expects {entry.verdict}: {entry.reason}"
        return verdict, f"{entry.source} expects {entry.verdict}, not {verdict}"

    def problems(self, collected: Sequence[str], *, is_complete: bool) -> list[str]:
        """What is wrong with the entries themselves, in one line each.

        Args:
            collected: the ids of all cases that this run collected for the implementation.
            is_complete: nothing was deselected, so that an entry without a case is out of date.
        """
        found = []
        for entry in self._entries:
            if entry.has_expired(self._today):
                found.append(f"{entry.source} expired on {entry.expires}: {entry.case} ({entry.reason})")
            elif is_complete and not any(entry.matches(case_id) for case_id in collected):
                found.append(f"{entry.source} matches no case: {entry.case}")
        return found


def load(directory: pathlib.Path, implementation: str) -> list[KnownFailure]:
    """The entries of ``<directory>/<implementation>.toml``; none if there is no such file.

    Raises:
        ValueError: the file is not TOML, or an entry is not what it should be; one line that names it.
    """
    path = directory / f"{implementation}.toml"
    if not path.is_file():
        return []
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if unknown := sorted(document.keys() - {"expect"}):
        raise ValueError(f"{path.name}: unknown {unknown[0]!r}; entries are [[expect]]")
    listed = document.get("expect", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ValueError(f"{path.name}: entries are [[expect]], with two brackets")
    return [_entry(item, f"{path.name} entry {number}") for number, item in enumerate(listed, start=1)]


def _entry(item: dict[str, Any], source: str) -> KnownFailure:
    if lacking := sorted(_REQUIRED - item.keys()):
        raise ValueError(f"{source}: {lacking[0]!r} is missing")
    if unknown := sorted(item.keys() - _REQUIRED - _OPTIONAL):
        raise ValueError(f"{source}: unknown {unknown[0]!r}")
    for name in sorted(_REQUIRED):
        if not isinstance(item[name], str) or not item[name].strip():
            raise ValueError(f"{source}: {name} = {item[name]!r} should be a text")
    if item["verdict"] not in list(_EXPECTABLE):
        expectable = ", ".join(_EXPECTABLE)
        raise ValueError(f"{source}: verdict = {item['verdict']!r} cannot be expected; {expectable} can")
    return KnownFailure(
        case=item["case"],
        verdict=Verdict(item["verdict"]),
        reason=item["reason"],
        link=item["link"],
        torch=_specifiers(item.get("torch", ""), source),
        device=_device(item.get("device"), source),
        expires=_date(item.get("expires"), source),
        source=source,
    )


def _specifiers(value: Any, source: str) -> SpecifierSet:
    try:
        if isinstance(value, str):
            return SpecifierSet(value)
    except InvalidSpecifier:
        pass
    raise ValueError(f"{source}: torch = {value!r} should be versions such as '>=2.11,<2.14'")


def _device(value: Any, source: str) -> str | None:
    if value is None or (isinstance(value, str) and value in _DEVICES):
        return value
    raise ValueError(f"{source}: device = {value!r} should be one of {', '.join(_DEVICES)}")


def _date(value: Any, source: str) -> datetime.date | None:
    # A TOML date-time is a date too, and comparing the two raises.
    if value is None or (isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)):
        return value
    raise ValueError(f"{source}: expires = {value!r} should be a date such as 2027-06-30, without quotes")


class RunKnownFailures:
    """What this run's cases are expected to do, by the folder beside them and the implementation.

    Tell it all cases with :meth:`read`, let it :meth:`judge` each, then ask for :meth:`problems`.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._read: dict[tuple[pathlib.Path, str], KnownFailures] = {}
        self._collected: list[pytest.Item] = []
        self._cases: list[pytest.Function] = []

    def read(self, collected: Sequence[pytest.Item]) -> list[str]:
        """Read the files beside the cases among all collected items, also those that will be deselected.

        Returns:
            what is wrong with the files, a line for each.
        """
        import torch

        errors = []
        self._collected = list(collected)
        self._cases = [item for item in collected if isinstance(item, pytest.Function) and cases.is_case(item)]
        for folder, implementation in sorted({_key(item) for item in self._cases}):
            try:
                entries = load(folder, implementation)
            except ValueError as error:
                errors.append(f"{FOLDER}/{error}")
                continue
            self._read[folder, implementation] = KnownFailures(
                entries, torch_version=torch.__version__, device=self._selection.device, today=datetime.date.today()
            )
        return errors

    def judge(self, item: pytest.Function, made: CaseRecord) -> None:
        """Let the record say what its verdict is in the light of what was expected."""
        verdict, why = self._read[_key(item)].judge(made.id, made.verdict)
        if verdict == Verdict.EXPECTED_FAIL:
            made.expected = f"{made.verdict}: {why}"
        elif why:
            made.text = f"{made.text}\n{why}".lstrip("\n")
        made.verdict = verdict

    def problems(self, remaining: Iterable[pytest.Item], config: pytest.Config) -> list[str]:
        """What is wrong with the entries themselves, a line for each.

        Args:
            remaining: what of the collected items was not deselected.
            config: whether the run was narrowed in ways that leave no trace in the items.
        """
        found = []
        narrowed = self._selection.worlds is not None or any("::" in argument for argument in config.args)
        narrowed = narrowed or _is_narrowed(self._collected, remaining)
        patterns = config.getini("python_files")
        for key, expectations in self._read.items():
            is_complete = not narrowed and _has_every_file(key[0].parent, self._collected, patterns)
            ids = [cases.case_id(item) for item in self._cases if _key(item) == key]
            found += [f"{FOLDER}/{line}" for line in expectations.problems(ids, is_complete=is_complete)]
        return found


def _key(item: pytest.Function) -> tuple[pathlib.Path, str]:
    return item.path.parent / FOLDER, cases.launch_of(item).implementation


def _is_narrowed(collected: Iterable[pytest.Item], remaining: Iterable[pytest.Item]) -> bool:
    """Whether an item was deselected that is not nightly: those are left out of ordinary runs."""
    left_out = set(collected) - set(remaining)
    return any(item.get_closest_marker("nightly") is None for item in left_out)


def _has_every_file(folder: pathlib.Path, collected: Iterable[pytest.Item], patterns: Sequence[str]) -> bool:
    """Whether every file of cases in the folder was collected: whole chapters can be left out, or not import."""
    files = {path for path in folder.glob("*.py") if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)}
    return files <= {item.path for item in collected}
