"""The known failures of a whole run: which files it reads, and what is wrong with their entries at its end."""

from __future__ import annotations

import datetime
import fnmatch
import functools
import pathlib
from collections.abc import Collection, Iterable, Sequence

import pytest

from shardproof.harness.plugin import cases
from shardproof.harness.plugin.known_failures import (
    FOLDER,
    KnownFailure,
    KnownFailures,
    load,
    load_file,
)
from shardproof.harness.plugin.records import CaseRecord
from shardproof.harness.plugin.selection import Selection
from shardproof.harness.plugin.suite_modules import is_packaged
from shardproof.harness.verdicts.verdict import Verdict


class RunKnownFailures:
    """The known failures of all cases of a run, for every directory of cases and every implementation.

    :meth:`read` is called once after collection, :meth:`judge` for each case, and :meth:`problems` at the end.

    Args:
        selection: the checked options of the run.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._read: dict[tuple[pathlib.Path, str], KnownFailures] = {}
        #: The entries of ``--expectations``, by implementation.
        self._given: dict[str, KnownFailures] = {}
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
            except ValueError as error:
                errors.append(f"{FOLDER}/{error}")
        given: dict[str, list[KnownFailure]] = {}
        for path in self._selection.expectations:
            try:
                implementation, entries = load_file(path)
            except ValueError as error:
                errors.append(f"--expectations {error}")
                continue
            if implementation not in self._selection.implementations:
                errors.append(
                    f"--expectations {path}: there is no {implementation!r} in --impl "
                    f"{','.join(self._selection.implementations)}; name the file after one of them, or begin it with "
                    'implementation = "..."'
                )
            given.setdefault(implementation, []).extend(entries)
        self._given = {implementation: self._applying(entries) for implementation, entries in given.items()}
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

    def judge(self, item: pytest.Function, made: CaseRecord) -> None:
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
        """Return one line for each entry that has expired or that matches no case of a complete run.

        A run is complete for a directory if it collected every file of cases in it, without ``--world``, ``--simulate``
        and node ids, and deselected only cases marked ``nightly`` or ``simulated``. An entry of ``--expectations``
        belongs to the directory of which its pattern begins with the path.

        Args:
            remaining: the collected items that were not deselected.
            config: pytest's configuration, whose arguments show whether node ids were given.
        """
        found = []
        options = self._selection.worlds is not None or bool(self._selection.simulates)
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
    elsewhere = pathlib.Path(file).is_file() or is_packaged(file)
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
