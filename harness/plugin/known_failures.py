"""Known failures: strict expected failures, read from ``suites/expectations/<implementation>.toml``.

An entry names cases and the verdict that is expected of them::

    [[expect]]
    case = "suites/test_clipping.py::test_empty_shards[w4-*]"
    verdict = "fail"
    reason = "the inf-norm of an empty shard raises"
    link = "docs/findings.md, F-2"
    torch = ">=2.11,<2.14"
    device = "cuda"
    backend = "nccl"
    expires = 2027-06-30

- ``case`` is an ``fnmatch`` pattern for the ids of cases, in which brackets are literal. Ids do not contain the name of
  the implementation.
- ``verdict`` is "fail", "hang" or "crash". A case with another verdict than the expected one keeps its own.
- ``reason`` and ``link`` explain the failure.
- ``torch``, ``device``, ``backend`` and ``expires`` are optional. An entry for other versions of torch, for another
  device type or for another backend of process groups does not apply. ``torch`` is compared with the release part of
  the installed version: 2.16.0.dev20270101+git counts as 2.16.0. ``expires`` is the last day on which the entry
  applies.

Expectations are strict. The run fails if an expected failure passes, if an entry has expired, and, in a complete run,
if an entry matches no case.

A file may begin with ``also = "..."``, the name of another implementation that this one wraps: the entries of the
other's file apply after its own.

A file of ``--expectations`` has the same entries for cases of any folder. The implementation is the name of the file
without ``.toml``, or what a first line ``implementation = "..."`` names.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import pathlib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from shardproof.harness.verdicts.verdict import Verdict

FOLDER = "expectations"
"""The name of the directory with the files, beside the files of the cases."""

#: The verdicts that an entry may expect. The others are no failures, or do not come from the implementation.
_EXPECTABLE = (Verdict.FAIL, Verdict.HANG, Verdict.CRASH)

_REQUIRED = {"case", "verdict", "reason", "link"}
_OPTIONAL = {"torch", "device", "backend", "expires"}
_DEVICES = ("cpu", "cuda")
_BACKENDS = ("gloo", "nccl")


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """One entry of a file of known failures, parsed and checked.

    Attributes:
        case: the pattern for the ids of cases.
        verdict: the expected verdict.
        reason: why the cases fail, in one line.
        link: where the failure is described.
        torch: the versions of torch to which the entry applies.
        device: the device type to which it applies; None applies to all.
        backend: the backend of process groups to which it applies; None applies to all.
        expires: the last day on which it applies; None never expires.
        source: the file and the number of the entry in it, for messages.
    """

    case: str
    verdict: Verdict
    reason: str
    link: str
    torch: SpecifierSet
    device: str | None
    backend: str | None
    expires: datetime.date | None
    source: str

    def matches(self, case_id: str) -> bool:
        """Return whether the entry's pattern matches this id."""
        return fnmatch.fnmatchcase(case_id, self.case.replace("[", "[[]"))

    def applies_to(self, torch_version: str, device: str, backend: str) -> bool:
        """Return whether the entry is for this version of torch, device type and backend.

        Only the release part of the version counts: a nightly of 2.16 has what was mended for 2.16, and by PEP 440
        2.16.0.dev1 would be in neither ``<2.16`` nor ``>=2.16``.
        """
        here = self.device in (None, device) and self.backend in (None, backend)
        return here and self.torch.contains(Version(torch_version).base_version)

    def as_record(self) -> dict[str, str]:
        """Return what the record of a case has of the entry."""
        return {"source": self.source, "case": self.case, "link": self.link, "torch": str(self.torch)}

    def has_expired(self, today: datetime.date) -> bool:
        """Return whether the last day on which the entry applies is over."""
        return self.expires is not None and today > self.expires


class KnownFailures:
    """The entries of one implementation that apply to one version of torch, one device type and one backend.

    Args:
        entries: all entries of the implementation; those that do not apply are dropped.
        torch_version: the version of torch of the run.
        device: the device type of the run.
        backend: the backend of its process groups.
        today: the date that decides which entries have expired.
    """

    def __init__(
        self,
        entries: Iterable[KnownFailure],
        *,
        torch_version: str,
        device: str,
        backend: str,
        today: datetime.date,
    ) -> None:
        self._entries = [entry for entry in entries if entry.applies_to(torch_version, device, backend)]
        self._today = today

    def judge(self, case_id: str, verdict: Verdict) -> tuple[Verdict, str]:
        """Apply the first entry that matches a case to its verdict.

        Skips are not changed, because the case did not run. A verdict other than the expected one is kept.

        Args:
            case_id: the id of the case.
            verdict: the verdict of its ranks.

        Returns:
            The new verdict, and an explanation that names the entry; "" where no entry was applied.
        """
        entry = self.first(case_id)
        if entry is None or verdict.is_skip or entry.has_expired(self._today):
            return verdict, ""
        if verdict == entry.verdict:
            return Verdict.EXPECTED_FAIL, f"{entry.reason} ({entry.link})"
        if verdict == Verdict.PASS:
            return Verdict.UNEXPECTED_PASS, f"passed, but {entry.source} expects {entry.verdict}: {entry.reason}"
        return verdict, f"{entry.source} expects {entry.verdict}, not {verdict}"

    def first(self, case_id: str) -> KnownFailure | None:
        """Return the first entry that matches this id, which is the one that applies."""
        return next((entry for entry in self._entries if entry.matches(case_id)), None)

    def problems(
        self,
        collected: Sequence[str],
        *,
        is_complete: bool,
        belongs: Callable[[str], bool] | None = None,
    ) -> list[str]:
        """Return one line for each entry that has expired or that matches no case of a complete run.

        Args:
            collected: the ids of all cases that the run collected for the implementation.
            is_complete: whether the run collected every case, so that an entry that matches none is out of date.
            belongs: whether a pattern is one for the cases that the run collected, where entries may name others too.
        """
        found = []
        for entry in self._entries:
            if entry.has_expired(self._today):
                found.append(f"{entry.source} expired on {entry.expires}: {entry.case} ({entry.reason})")
            elif belongs is not None and not belongs(entry.case):
                continue
            elif is_complete and not any(map(entry.matches, collected)):
                found.append(f"{entry.source} matches no case: {entry.case}")
        return found


def load(directory: pathlib.Path, implementation: str) -> list[KnownFailure]:
    """Read the entries of ``<directory>/<implementation>.toml``, then those of the file that its ``also`` names.

    A file that does not exist has no entries.

    Raises:
        ValueError: the file is not valid TOML, an entry is not valid, or ``also`` names no other file. The message is
            one line that names the file and the entry.
    """
    path = directory / f"{implementation}.toml"
    if not path.is_file():
        return []
    document = _document(path)
    also = document.pop("also", None)
    own = _entries(document, path)
    if also is None:
        return own
    wrapped = directory / f"{also}.toml"
    if not isinstance(also, str) or also == implementation or not wrapped.is_file():
        raise ValueError(f"{path.name}: also = {also!r} should be another implementation that has a file here")
    return own + _entries(_document(wrapped), wrapped)


def load_file(path: pathlib.Path) -> tuple[str, list[KnownFailure]]:
    """Read a file of ``--expectations``.

    Returns:
        The name of the implementation, and the entries.

    Raises:
        ValueError: the file cannot be read, is not valid TOML or an entry is not valid. The message is one line that
            names the file and the entry.
    """
    try:
        document = _document(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    implementation = document.pop("implementation", path.name.removesuffix(".toml"))
    if not isinstance(implementation, str):
        raise ValueError(f"{path.name}: implementation = {implementation!r} should be a name that --impl takes")
    return implementation, _entries(document, path)


def _document(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _entries(document: dict[str, Any], path: pathlib.Path) -> list[KnownFailure]:
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
            raise ValueError(f"{source}: {name} = {item[name]!r} should be a non-empty string")
    if item["verdict"] not in list(_EXPECTABLE):
        expectable = ", ".join(_EXPECTABLE)
        raise ValueError(f"{source}: verdict = {item['verdict']!r} should be one of {expectable}")
    return KnownFailure(
        case=item["case"],
        verdict=Verdict(item["verdict"]),
        reason=item["reason"],
        link=item["link"],
        torch=_specifiers(item.get("torch", ""), source),
        device=_one_of(_DEVICES, "device", item, source),
        backend=_one_of(_BACKENDS, "backend", item, source),
        expires=_date(item.get("expires"), source),
        source=source,
    )


def _specifiers(value: Any, source: str) -> SpecifierSet:
    try:
        if isinstance(value, str):
            return SpecifierSet(value)
    except InvalidSpecifier:
        pass
    raise ValueError(f"{source}: torch = {value!r} should be a version specifier such as '>=2.11,<2.14'")


def _one_of(choices: Sequence[str], name: str, item: Mapping[str, Any], source: str) -> str | None:
    value = item.get(name)
    if value is None or (isinstance(value, str) and value in choices):
        return value
    raise ValueError(f"{source}: {name} = {value!r} should be one of {', '.join(choices)}")


def _date(value: Any, source: str) -> datetime.date | None:
    # A TOML date-time is parsed to a datetime, which is a subclass of date but cannot be compared with one.
    if value is None or (isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)):
        return value
    raise ValueError(f"{source}: expires = {value!r} should be a date such as 2027-06-30, without quotes")
