"""Known failures: strict expected failures, read from ``suites/expectations/<implementation>.toml``.

An entry names the cases of one reason and the verdict that is expected of them::

    [[expect]]
    cases = ["suites/test_clipping.py::test_empty_shards[w4-*]"]
    verdict = "fail"
    reason = "the inf-norm of an empty shard raises"
    link = "findings/F002.py"
    torch = ">=2.11,<2.14"
    device = "xpu"
    backend = "xccl"
    expires = 2027-06-30
    races = true

- ``cases`` are ``fnmatch`` patterns for the ids of cases, in which brackets are literal. Ids do not contain the name of
  the implementation.
- ``verdict`` is "fail", "hang" or "crash", or "pass" to take cases out of a later entry whose pattern matches them as
  well. A case with another verdict than the expected one keeps its own.
- ``reason`` and ``link`` explain the failure.
- ``torch``, ``device``, ``backend``, ``expires`` and ``races`` are optional. An entry for other versions of torch, for
  another device type or for another backend of process groups does not apply. ``torch`` is compared with the release
  part of the installed version: 2.16.0.dev20270101+git counts as 2.16.0. ``expires`` is the last day on which the entry
  applies. ``races`` says that the failure is a race, which not every run shows: then a case may pass as well.

Expectations are strict. The run fails if an expected failure passes and is no race, if an entry has expired, and, in a
complete run, if a pattern of an entry matches no case.

A file may begin with ``also = "..."``, the name of another implementation that this one wraps: the entries of the
other's file apply after its own.

A file of ``--expectations`` has the same entries for cases of any folder. The implementation is the name of the file
without ``.toml``, or what a first line ``implementation = "..."`` names.
"""

import dataclasses
import datetime
import fnmatch
import functools
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from shardproof import door, renamed, runfile
from shardproof.door import BadFile, printable
from shardproof.harness.plugin import cases, packaged
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.selection import Selection
from shardproof.runfile import Verdict

FOLDER = "expectations"
"""The name of the directory with the files, beside the files of the cases."""

#: The verdicts that an entry may expect. The others do not come from the implementation.
_EXPECTABLE = (Verdict.FAIL, Verdict.HANG, Verdict.CRASH, Verdict.PASS)

_TEXTS = ("verdict", "reason", "link")
_REQUIRED = {"cases", *_TEXTS}
_OPTIONAL = {"torch", "device", "backend", "expires", "races"}


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """One pattern of an entry of a file of known failures with what the entry says, parsed and checked.

    Attributes:
        case: the pattern for the ids of cases.
        verdict: the expected verdict.
        reason: why the cases fail, in one line.
        link: where the failure is described.
        torch: the versions of torch to which the entry applies.
        device: the device type to which it applies; None applies to all.
        backend: the backend of process groups to which it applies; None applies to all.
        expires: the last day on which it applies; None never expires.
        races: whether not every run shows the failure, so that a case may pass as well.
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
    races: bool
    source: str

    def matches(self, case_id: str) -> bool:
        """Return whether the pattern matches this id."""
        return fnmatch.fnmatchcase(case_id, self.case.replace("[", "[[]"))

    def applies_to(self, torch_version: str, device: str, backend: str) -> bool:
        """Return whether the entry is for this version of torch, device type and backend.

        Only the release part of the version counts: a nightly of 2.16 has what was mended for 2.16, and by PEP 440
        2.16.0.dev1 would be in neither ``<2.16`` nor ``>=2.16``.
        """
        here = self.device in (None, device) and self.backend in (None, backend)
        return here and self.torch.contains(Version(torch_version).base_version)

    def as_record(self) -> runfile.KnownFailure:
        """Return what the record of a case has of the entry."""
        return runfile.KnownFailure(source=self.source, case=self.case, link=self.link, torch=str(self.torch))

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
        self, entries: Iterable[KnownFailure], *, torch_version: str, device: str, backend: str, today: datetime.date
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
        if entry is None or entry.verdict == Verdict.PASS or verdict.is_skip or entry.has_expired(self._today):
            return verdict, ""
        if verdict == entry.verdict:
            return Verdict.EXPECTED_FAIL, f"{entry.reason} ({entry.link})"
        if verdict == Verdict.PASS:
            if entry.races:
                return verdict, ""
            return Verdict.UNEXPECTED_PASS, f"passed, but {entry.source} expects {entry.verdict}: {entry.reason}"
        return verdict, f"{entry.source} expects {entry.verdict}, not {verdict}"

    def first(self, case_id: str) -> KnownFailure | None:
        """Return the first entry that matches this id, which is the one that applies."""
        return next((entry for entry in self._entries if entry.matches(case_id)), None)

    def problems(
        self, collected: Sequence[str], *, is_complete: bool, belongs: Callable[[str], bool] | None = None
    ) -> list[str]:
        """Return one line for each pattern whose entry has expired, or that matches no case of a complete run.

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
        BadFile: the file is not valid TOML, an entry is not valid, or ``also`` names no other file. The message is
            one line that names the file and the entry.
    """
    path = directory / f"{implementation}.toml"
    return _with_wrapped(door.toml(path), path, implementation, directory) if path.is_file() else []


def _with_wrapped(
    document: dict[str, Any], path: pathlib.Path, implementation: str, directory: pathlib.Path
) -> list[KnownFailure]:
    """The entries of a file, then the entries of the file in ``directory`` that its ``also`` names."""
    also = document.pop("also", None)
    own = _entries(document, path)
    if also is None:
        return own
    wrapped = directory / f"{also}.toml"
    if not isinstance(also, str) or also == implementation or not wrapped.is_file():
        known = ", ".join(sorted(one.stem for one in directory.glob("*.toml")))
        raise BadFile(f"{path.name}: also = {also!r} should be another implementation that has a file: {known}")
    return own + _entries(door.toml(wrapped), wrapped)


def load_given(path: pathlib.Path) -> tuple[str, list[KnownFailure]]:
    """Read a file of ``--expectations``; its ``also`` names an implementation of the packaged suites' folder.

    Returns:
        The name of the implementation, and the entries.

    Raises:
        BadFile: the file cannot be read, is not valid TOML or an entry is not valid. The message is one line that
            names the file and the entry.
    """
    document = door.toml(path)
    implementation = document.pop("implementation", path.name.removesuffix(".toml"))
    if not isinstance(implementation, str):
        raise BadFile(f"{path.name}: implementation = {implementation!r} should be a name that --impl takes")
    return implementation, _with_wrapped(document, path, implementation, packaged.SUITES / FOLDER)


def _entries(document: dict[str, Any], path: pathlib.Path) -> list[KnownFailure]:
    if unknown := sorted(document.keys() - {"expect"}):
        raise BadFile(f"{path.name}: unknown {unknown[0]!r}; entries are [[expect]]")
    listed = document.get("expect", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise BadFile(f"{path.name}: entries are [[expect]], with two brackets")
    numbered = enumerate(listed, start=1)
    return [known for number, item in numbered for known in _entry(item, printable(f"{path.name} entry {number}"))]


def _entry(item: dict[str, Any], source: str) -> list[KnownFailure]:
    """What an entry says, for each of its patterns."""
    if lacking := sorted(_REQUIRED - item.keys()):
        raise BadFile(f"{source}: {lacking[0]!r} is missing")
    if unknown := sorted(item.keys() - _REQUIRED - _OPTIONAL):
        raise BadFile(f"{source}: unknown {unknown[0]!r}")
    if not isinstance(item["cases"], list) or not item["cases"] or not all(map(_is_text, item["cases"])):
        raise BadFile(f"{source}: cases = {item['cases']!r} should be a list of patterns, each a non-empty string")
    for name in _TEXTS:
        if not _is_text(item[name]):
            raise BadFile(f"{source}: {name} = {item[name]!r} should be a non-empty string")
    if item["verdict"] not in list(_EXPECTABLE):
        expectable = ", ".join(_EXPECTABLE)
        raise BadFile(f"{source}: verdict = {item['verdict']!r} should be one of {expectable}")
    from shardproof.harness.tensors import devices  # late: it imports torch

    first, *others = map(renamed.item, item["cases"])
    known = KnownFailure(
        case=first,
        verdict=Verdict(item["verdict"]),
        reason=printable(item["reason"]),
        link=printable(item["link"]),
        torch=_specifiers(item.get("torch", ""), source),
        device=_one_of(tuple(devices.BACKENDS), "device", item, source),
        backend=_one_of(sorted({*devices.BACKENDS.values()}), "backend", item, source),
        expires=_date(item.get("expires"), source),
        races=_flag("races", item, source),
        source=source,
    )
    return [known, *(dataclasses.replace(known, case=case) for case in others)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _specifiers(value: Any, source: str) -> SpecifierSet:
    try:
        if isinstance(value, str):
            return SpecifierSet(value)
    except InvalidSpecifier:
        pass
    raise BadFile(f"{source}: torch = {value!r} should be a version specifier such as '>=2.11,<2.14'")


def _one_of(choices: Sequence[str], name: str, item: Mapping[str, Any], source: str) -> str | None:
    value = item.get(name)
    if value is None or (isinstance(value, str) and value in choices):
        return value
    raise BadFile(f"{source}: {name} = {value!r} should be one of {', '.join(choices)}")


def _flag(name: str, item: Mapping[str, Any], source: str) -> bool:
    value = item.get(name, False)
    if isinstance(value, bool):
        return value
    raise BadFile(f"{source}: {name} = {value!r} should be true or false, without quotes")


def _date(value: Any, source: str) -> datetime.date | None:
    # A TOML date-time is parsed to a datetime, which is a subclass of date but cannot be compared with one.
    if value is None or (isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)):
        return value
    raise BadFile(f"{source}: expires = {value!r} should be a date such as 2027-06-30, without quotes")


# The known failures of a whole run: which files it reads, and what is wrong with their entries at its end.


class RunKnownFailures:
    """The known failures of all cases of a run, for every directory of cases and every implementation.

    Files of ``--expectations`` are read when it is made, before collection. :meth:`read` is called once after it,
    :meth:`judge` for each case, and :meth:`problems` at the end.

    Args:
        selection: the checked options of the run.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._read: dict[tuple[pathlib.Path, str], KnownFailures] = {}
        #: The entries of ``--expectations``, by implementation.
        self._given = {name: self._applying(entries) for name, entries in _given(selection).items()}
        self._collected: list[pytest.Item] = []
        self._cases: list[pytest.Function] = []

    def read(self, collected: Sequence[pytest.Item]) -> list[str]:
        """Read the files for all cases among the collected items.

        Args:
            collected: all collected items, those that will be deselected included.

        Returns:
            One line for each file that cannot be read or is not valid.
        """
        errors = []
        self._collected = list(collected)
        self._cases = [item for item in collected if cases.is_case(item)]
        for folder, implementation in sorted({_key(item) for item in self._cases}):
            try:
                self._read[folder, implementation] = self._applying(load(folder, implementation))
            except BadFile as error:
                errors.append(f"{FOLDER}/{error}")
        return errors

    def _applying(self, entries: Iterable[KnownFailure]) -> KnownFailures:
        import torch

        return KnownFailures(
            entries,
            torch_version=torch.__version__,
            device=self._selection.device,
            backend=self._selection.backend,
            today=datetime.date.today(),
        )

    def judge(self, item: pytest.Function, made: MadeRecord) -> None:
        """Apply the known failures to the record of a case, in place; those of ``--expectations`` come first."""
        beside = self._read[_key(item)]
        given = self._given.get(made.implementation)
        which = beside if given is None or given.first(made.id) is None else given
        verdict, why = which.judge(made.id, made.verdict)
        entry = which.first(made.id)
        if entry is not None and verdict in (Verdict.EXPECTED_FAIL, Verdict.UNEXPECTED_PASS):
            made.known_failure = entry.as_record()
        if verdict == Verdict.EXPECTED_FAIL:
            made.expected = f"{made.verdict}: {why}"
        elif why:
            made.text = f"{made.text}\n{why}".lstrip("\n")
        made.verdict = verdict

    def problems(self, remaining: Iterable[pytest.Item], config: pytest.Config) -> list[str]:
        """Return one line for each pattern whose entry has expired, or that matches no case of a complete run.

        A run is complete for a directory if it collected every file of cases in it, without ``--world``, ``--simulate``
        and node ids, and deselected only cases marked ``nightly`` or ``simulated``. A pattern of ``--expectations``
        belongs to the directory with whose path it begins.

        Args:
            remaining: the collected items that were not deselected.
            config: pytest's configuration, whose arguments show whether node ids were given.
        """
        found: list[str] = []
        if not self._cases:
            return found
        options = self._selection.world is not None or bool(self._selection.simulate)
        narrowed = options or any("::" in argument for argument in config.args)
        narrowed = narrowed or _is_narrowed(self._collected, remaining)
        patterns = config.getini("python_files")
        complete: dict[str, set[str]] = {}
        for key, expectations in self._read.items():
            is_complete = not narrowed and _has_every_file(key[0].parent, self._collected, patterns)
            ids = [cases.case_id(item) for item in self._cases if _key(item) == key]
            found += [f"{FOLDER}/{line}" for line in expectations.problems(ids, is_complete=is_complete)]
            if is_complete:
                complete.setdefault(key[1], set()).update(ids)
        for implementation, expectations in self._given.items():
            ids = [cases.case_id(item) for item in self._cases if _key(item)[1] == implementation]
            files = set(map(_file, complete.get(implementation, set())))
            lines = expectations.problems(ids, is_complete=True, belongs=functools.partial(_is_of, files))
            found += [f"--expectations {line}" for line in lines]
        return [*map(printable, found)]


def _given(selection: Selection) -> dict[str, list[KnownFailure]]:
    """Read the files of ``--expectations``.

    Raises:
        BadFile: one cannot be read, is not valid, or is for no implementation of the run.
    """
    found: dict[str, list[KnownFailure]] = {}
    for path in selection.expectations:
        try:
            implementation, entries = load_given(path)
        except BadFile as error:
            raise BadFile(f"--expectations {error}") from None
        if implementation not in selection.implementations:
            raise BadFile(
                f"--expectations {path}: there is no {implementation!r} in --impl "
                f"{','.join(selection.implementations)}; name the file after one of them, or begin it with "
                'implementation = "..."'
            )
        found.setdefault(implementation, []).extend(entries)
    return found


def _file(case_id: str) -> pathlib.PurePath:
    """Return the path of the file in the id of a case, or in a pattern of ids."""
    return pathlib.PurePath(case_id.partition("::")[0])


def _is_of(files: Collection[pathlib.PurePath], pattern: str) -> bool:
    """Return whether a pattern is one for cases of these files or of the directories that they are all of.

    A project's own folder may be called ``suites``, as that of the packaged suites is. A file of the other folder then
    belongs to another run.
    """
    file = _file(pattern)
    if file in files:
        return True
    elsewhere = pathlib.Path(file).is_file() or packaged.has(file)
    return file.parent in {one.parent for one in files} and not elsewhere


def _key(item: pytest.Function) -> tuple[pathlib.Path, str]:
    return item.path.parent / FOLDER, cases.launch_of(item).implementation


def _is_narrowed(collected: Iterable[pytest.Item], remaining: Iterable[pytest.Item]) -> bool:
    """Return whether any item was deselected except nightly and simulated ones, which ordinary runs leave out."""
    left_out = set(collected) - set(remaining)
    return any(not any(map(item.get_closest_marker, ("nightly", "simulated"))) for item in left_out)


def _has_every_file(folder: pathlib.Path, collected: Iterable[pytest.Item], patterns: Sequence[str]) -> bool:
    """Return whether every file of cases in the folder was collected; a file can be left out or fail to import."""
    files = {path for path in folder.glob("*.py") if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)}
    return files <= {item.path for item in collected}
