"""The expectations of a run: read beside the cases that it runs, applied to each, and checked themselves.

Light: imports no torch until cases were collected.
"""

from __future__ import annotations

import datetime
import fnmatch
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pytest

from harness import cases, expectations_file
from harness.expectations_file import Expectations
from harness.verdict import Verdict

if TYPE_CHECKING:
    from harness.record import CaseRecord
    from harness.selection import Selection

FOLDER = "expectations"
"""Where the files are: in this folder beside a case's own file."""


class RunExpectations:
    """What this run's cases are expected to do, by the folder beside them and the implementation.

    Tell it all cases with :meth:`read`, let it :meth:`judge` each, then ask for :meth:`problems`.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._read: dict[tuple[pathlib.Path, str], Expectations] = {}
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
                entries = expectations_file.load(folder, implementation)
            except ValueError as error:
                errors.append(f"{FOLDER}/{error}")
                continue
            self._read[folder, implementation] = Expectations(
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
