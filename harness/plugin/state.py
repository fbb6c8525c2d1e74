"""The state that the plugin's hooks share in one pytest process."""

from __future__ import annotations

import collections
import os
import pathlib
import sys
from typing import Any

import pytest

from shardproof.harness.plugin import selection
from shardproof.harness.plugin.known_failures import RunKnownFailures
from shardproof.harness.plugin.run_file import RunFile
from shardproof.harness.worlds.pool import Pool

_ERRORS = "shardproof_usage_errors"
_PROBLEMS = "shardproof_problems"


class State:
    """The plugin's state in one pytest process; its parts are made when they are first needed.

    Attributes:
        started: the number of cases that were started in this process.
        run_file: the run file; None until a report brings the first record.
        errors: the usage errors that xdist workers sent; a single process raises its own instead.
        problems: what is wrong with entries of known failures; any problem fails the run.
        verdicts: the number of cases for each (implementation, verdict).
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._selection: selection.Selection | None = None
        self._pool: Pool | None = None
        self._known_failures: RunKnownFailures | None = None
        self.started = 0
        self.run_file: RunFile | None = None
        self.errors: set[str] = set()
        self.problems: set[str] = set()
        self.verdicts: collections.Counter[tuple[str, str]] = collections.Counter()

    @property
    def selection(self) -> selection.Selection:
        """The checked options of the run.

        Raises:
            pytest.UsageError: an option has a value that is not valid or not available here.
        """
        if self._selection is None:
            option = self._config.option
            try:
                self._selection = selection.resolve(
                    implementations=option.shardproof_impl,
                    device=option.shardproof_device,
                    worlds=option.shardproof_world,
                    deadline=option.shardproof_deadline,
                    check_collectives=option.shardproof_check_collectives,
                )
            except ValueError as error:
                raise pytest.UsageError(str(error)) from None
        return self._selection

    @property
    def known_failures(self) -> RunKnownFailures:
        """The known failures of this run's cases."""
        if self._known_failures is None:
            self._known_failures = RunKnownFailures(self.selection)
        return self._known_failures

    @property
    def pool(self) -> Pool:
        """The worlds of this pytest process."""
        if self._pool is None:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
            self._pool = Pool(device_count=self.selection.device_count, worker=int(worker))
        return self._pool

    def close(self) -> None:
        """Stop all worlds."""
        if self._pool is not None:
            self._pool.close()

    def note_problems(self, session: pytest.Session) -> None:
        """Collect the problems of the entries of known failures; an xdist worker sends them to the controller."""
        if self._known_failures is not None:
            self.problems.update(self._known_failures.problems(session.items, session.config))
        if hasattr(session.config, "workerinput"):
            vars(session.config)["workeroutput"][_PROBLEMS] = sorted(self.problems)

    def refuse(self, config: pytest.Config, items: list[pytest.Item], errors: list[str]) -> None:
        """End the run because of errors found during collection.

        An xdist worker that raised here would look like a crash, so a worker drops all items and sends the errors to
        the controller.

        Args:
            config: pytest's configuration.
            items: all collected items; a worker empties the list.
            errors: one line for each error.

        Raises:
            pytest.UsageError: in a single process.
        """
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError("\n".join(errors))
        vars(config)["workeroutput"][_ERRORS] = errors
        items.clear()

    def take_worker_output(self, output: dict[str, Any]) -> None:
        """Add the errors and problems that an xdist worker sent when it ended."""
        self.errors.update(output.get(_ERRORS, ()))
        self.problems.update(output.get(_PROBLEMS, ()))

    def add(self, case: dict[str, Any]) -> None:
        """Add a case's record, as JSON values, to the run file and to the counts."""
        if self.run_file is None:
            self.run_file = RunFile(self.selection, command=[pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
        self.run_file.cases.append(case)
        self.verdicts[case["implementation"], case["verdict"]] += 1


STATE = pytest.StashKey[State]()
"""The key of the state in pytest's configuration."""
