"""The state that the plugin's hooks share in one pytest process."""

import collections
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from shardproof.door import BadFile
from shardproof.harness.plugin import cases, changed, command_line, environment, origin, packaged, selection, unasked
from shardproof.harness.plugin.ahead import Ahead
from shardproof.harness.plugin.journal import Journal
from shardproof.harness.plugin.known_failures import RunKnownFailures
from shardproof.harness.plugin.progress import Progress, Selected
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.reproduction import Invocation, invocation_of
from shardproof.harness.plugin.resuming import Resuming
from shardproof.harness.plugin.torchrun import FLEET
from shardproof.harness.worlds import scratch
from shardproof.harness.worlds.pool import Pool
from shardproof.harness.worlds.torchrun.fleet_pool import FleetPool
from shardproof.harness.worlds.torchrun.meeting import JobProcess
from shardproof.runfile import Effort

_ERRORS = "shardproof_usage_errors"
_PROBLEMS = "shardproof_problems"
_FOLDER = "shardproof_folder"
_INVOCATION = "shardproof_invocation"

#: Options of pytest with which it runs no test.
_WITHOUT_RUN = ("collectonly", "help", "version", "markers", "showfixtures", "show_fixtures_per_test")


class State:
    """The plugin's state in one pytest process; its parts are made when they are first needed.

    Attributes:
        numbers: gives each job of this process a number of its own, from 1.
        drawing: how many of the cases that are to run draw their parameter.
        journal: the run file; None without ``--report`` and in xdist workers.
        progress: which cases were selected and which have a record.
        errors: the usage errors that xdist workers sent; a single process raises its own instead.
        problems: what fails the run besides its cases, one line each: known failures without a case, implementations on
            which no case ran, an incomplete run.
        interruption: what ended the run early, such as the name of a signal; empty if nothing did.
        collection_errors: the number of files and directories that could not be collected.
        spared: the cases that the effort of the run leaves out; in an xdist run, of each worker.
        resuming: the earlier attempts of the torchrun job; None without torchrun or ``--report``.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pool: Pool | None = None
        self._ahead: Ahead | None = None
        self._known_failures: RunKnownFailures | None = None
        self._folder: pathlib.Path | None = None
        self.numbers = itertools.count(1)
        self.drawing = 0
        self.journal: Journal | None = None
        self.progress = Progress()
        self.errors: set[str] = set()
        self.problems: set[str] = set()
        self.interruption = ""
        self.collection_errors = 0
        self.spared: list[pytest.Function] = []
        #: The collected items that ``--world`` has left without a world.
        self.without_world: list[pytest.Item] = []
        self.resuming: Resuming | None = None

    @property
    def is_worker(self) -> bool:
        """Whether this process is an xdist worker."""
        return hasattr(self._config, "workerinput")

    @functools.cached_property
    def invocation(self) -> Invocation:
        """How the run was started."""
        if self.is_worker:
            return Invocation(**json.loads(vars(self._config)["workerinput"][_INVOCATION]))
        return invocation_of(self._config)

    @functools.cached_property
    def selection(self) -> selection.Selection:
        """The checked options of the run.

        Raises:
            pytest.UsageError: an option has a value that is not valid or not available here.
        """
        try:
            return selection.resolve(**command_line.values(self._config), process=self.process)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None

    @functools.cached_property
    def change(self) -> tuple[changed.Map, changed.Change] | None:
        """What was changed, by ``--changed`` and ``--changed-since``, and the map of who calls it; None without them.

        Raises:
            pytest.UsageError: the map cannot be read, or what is named was not changed.
        """
        chosen = self.selection
        if not chosen.changed and not chosen.changed_since:
            return None
        try:
            known = changed.read(chosen.map or changed.PACKED)
            return known, changed.find(chosen, known)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None

    @property
    def process(self) -> JobProcess | None:
        """This process in a job of torchrun, if it is the controller of one."""
        fleet = self._config.stash.get(FLEET, None)
        return None if fleet is None else fleet.process

    @property
    def seconds_to_draw(self) -> float | None:
        """How long each of the cases that draw may draw, by ``--fuzz``; None for a fixed number of examples."""
        fuzz = self.selection.fuzz
        return None if fuzz is None else fuzz / max(1, self.drawing)

    @property
    def known_failures(self) -> RunKnownFailures:
        """The known failures of this run's cases.

        Raises:
            pytest.UsageError: a file of ``--expectations`` cannot be read or is not valid.
        """
        if self._known_failures is None:
            try:
                self._known_failures = RunKnownFailures(self.selection)
            except BadFile as error:
                raise pytest.UsageError(str(error)) from None
        return self._known_failures

    @property
    def pool(self) -> Pool:
        """The worlds of this pytest process."""
        if self._pool is None:
            fleet = self._config.stash.get(FLEET, None)
            if fleet is not None:
                self._pool = FleetPool(fleet)
                return self._pool
            worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
            self._pool = Pool(device_count=self.selection.device_count, worker=int(worker))
        return self._pool

    def run(self, item: pytest.Function) -> MadeRecord:
        """Run or skip a case and return its record; in a torchrun job others run at the same time."""
        fleet = self._config.stash.get(FLEET, None)
        if fleet is None:
            return self._run(item)
        if self._ahead is None:
            pool = self.pool
            assert isinstance(pool, FleetPool), "a job has worlds of its own"
            items = item.session.items
            self._ahead = Ahead(items, fleet, pool, run=self._run, may_run=lambda one: not self._is_over(one))
        return self._ahead.run(item)

    def _run(self, item: pytest.Function) -> MadeRecord:
        if self.resuming is not None:
            self.resuming.begin(_key(item))
        seconds = self.seconds_to_draw
        return cases.run(item, self.pool, self.selection, numbers=self.numbers, seconds=seconds)

    def _is_over(self, item: pytest.Function) -> bool:
        """Whether an earlier attempt of the torchrun job has run a case, or was interrupted in it."""
        known = self.resuming
        return known is not None and (_key(item) in known.records or _key(item) in known.interrupted)

    def close(self) -> None:
        """Stop all worlds, and remove what xdist workers that were killed have left."""
        if self._ahead is not None:
            self._ahead.close()
        if self._pool is not None:
            self._pool.close()
        if not self.is_worker:
            scratch.remove_abandoned()

    def note_problems(self, session: pytest.Session) -> None:
        """Collect the problems of the entries of known failures; an xdist worker sends them to the controller."""
        if self._known_failures is not None:
            # What the effort leaves out narrows no run: entries are compared with the ids of all collected cases.
            remaining = [*session.items, *self.spared]
            self.problems.update(self._known_failures.problems(remaining, session.config))
        if self.is_worker:
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
        if not self.is_worker:
            self.interruption = errors[0]
            raise pytest.UsageError("\n".join(errors))
        vars(config)["workeroutput"][_ERRORS] = errors
        items.clear()

    def take_worker_output(self, output: dict[str, Any]) -> None:
        """Add the errors and problems that an xdist worker sent when it ended."""
        self.errors.update(output.get(_ERRORS, ()))
        self.problems.update(output.get(_PROBLEMS, ()))

    # the run file ------------------------------------------------------------------------

    def open_journal(self) -> None:
        """Open the run file, if there is to be one, and write the environment of the run.

        Raises:
            pytest.UsageError: the run file cannot be written there, or an option is not valid.
            pytest.exit.Exception: an earlier attempt of the torchrun job has completed the run.
        """
        path = self._config.option.shardproof_report
        # What runs nothing has nothing to report, and an earlier run file stays as it is.
        runs_nothing = any(getattr(self._config.option, name, False) for name in _WITHOUT_RUN)
        if not path or self.is_worker or runs_nothing:
            return
        if self.process is not None:
            self.resuming = Resuming(pathlib.Path(path), self.process)
            if (code := self.resuming.exit_code) is not None:
                pytest.exit(f"the run is complete, with exit code {code}, since an earlier attempt of the job", code)
        try:
            self.journal = Journal(pathlib.Path(path))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        command = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
        fleet, started = self._config.stash.get(FLEET, None), self.journal.started
        try:
            described = environment.describe(self.selection, command=command, started=started, fleet=fleet)
            self.journal.describe(described)
            self.known_failures  # noqa: B018  (reads its files)
        except pytest.UsageError as error:
            self.journal.finish(reason=str(error), exit_code=pytest.ExitCode.USAGE_ERROR)
            raise

    def select(self, items: list[pytest.Item]) -> None:
        """Note the cases that are to run; an xdist worker leaves their list for the controller."""
        selected, spared = _ids(filter(cases.is_case, items)), _ids(self.spared)
        found = {} if self._is_narrowed else unasked.find(self.without_world, items, self.selection)
        files = {_file(cases.case_id(item)): str(item.path) for item in [*filter(cases.is_case, items), *self.spared]}
        self.drawing = sum(cases.draws(item, self.selection) for item in items if cases.is_case(item))
        if self.is_worker:
            given = vars(self._config)["workerinput"]
            if _FOLDER in given:
                pathlib.Path(given[_FOLDER], given["workerid"]).write_text(json.dumps([selected, spared, found, files]))
        else:
            self._selected(selected, spared, found, files)

    @property
    def _is_narrowed(self) -> bool:
        """Whether the command line names single cases, and so asks for no others."""
        return bool(self._config.option.keyword) or any("::" in argument for argument in self._config.args)

    def configure_worker(self, given: dict[str, Any]) -> None:
        """Tell an xdist worker how the run was started, and where to leave the list of its cases.

        xdist itself passes on their node ids only.
        """
        if self._folder is None:
            self._folder = scratch.directory("selected-")
        given[_FOLDER] = str(self._folder)
        given[_INVOCATION] = json.dumps(dataclasses.asdict(self.invocation))

    def take_selected(self, worker: str) -> None:
        """Read the list of cases that an xdist worker has left; all workers have the same."""
        assert self._folder is not None, "workers are configured before they collect"
        path = self._folder / worker
        if not self.progress.selected and path.exists():
            self._selected(*json.loads(path.read_text()))

    def _selected(self, selected: Selected, spared: Selected, found: unasked.Unasked, files: dict[str, str]) -> None:
        self.progress.selected, self.progress.unasked = selected, found
        self.progress.spared = {name: collections.Counter(map(_file, ids)) for name, ids in spared.items()}
        if self.journal is not None and selected:
            suites = _hash_of_suites({name: pathlib.Path(path) for name, path in files.items()})
            chosen = self.selection
            effort = Effort(name=chosen.effort, deselected=self.progress.spared, profile=",".join(chosen.profile))
            self.journal.select(selected, effort=effort, unasked=found, suites=suites)
            if self.resuming is not None:
                for (name, id_), record in self.resuming.records.items():
                    if id_ in selected.get(name, ()):
                        self.journal.add(record)
                self.resuming.forget()

    def earlier(self, item: pytest.Function) -> MadeRecord | None:
        """Return the record of a case that an earlier attempt of the torchrun job has run, or was interrupted in."""
        if self.resuming is None:
            return None
        key = _key(item)
        if key in self.resuming.records:
            return MadeRecord.repeated(self.resuming.records[key])
        if key in self.resuming.interrupted:
            return cases.interrupted_by_a_restart(item, self.selection)
        return None

    def add(self, record: dict[str, Any]) -> None:
        """Add a case's record, as JSON values, to the counts and the run file."""
        attempt = self.progress.add(record)
        if self.resuming is not None:
            self.resuming.end((record["implementation"], record["id"]))
        earlier = {} if self.resuming is None else self.resuming.records
        if self.journal is not None and earlier.get((record["implementation"], record["id"])) != record:
            self.journal.add(record | ({"attempt": attempt} if attempt > 1 else {}))

    def finish_journal(self, *, reason: str, exit_code: int) -> bool:
        """Complete the run file, or leave its journal with the reason why it is incomplete.

        Returns:
            Whether the run file is complete, or there is none.
        """
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self.journal is None or not self.journal.is_open:
            return True
        is_complete = self.journal.finish(
            reason=reason, exit_code=exit_code, left_out=self.progress.left_out, problems=sorted(self.problems)
        )
        if self.resuming is not None and is_complete:
            self.resuming.close()
        return is_complete

    def why_incomplete(self, session: pytest.Session) -> str:
        """Return in one line why the run is incomplete; "" if every selected case has a record."""
        reasons = [*sorted(self.errors)[:1], self.interruption]
        if given := next((reason for reason in reasons if reason), ""):
            return given.splitlines()[0]
        if self.collection_errors:
            return f"{self.collection_errors} errors during collection"
        if not self.progress.selected:
            return "no case was selected"
        if missing := self.progress.missing:
            stopped = session.shouldfail or session.shouldstop
            why = f"{stopped}: " if stopped else ""
            return (
                f"{why}{len(missing)} of {self.progress.count} selected cases have no record; the first is {missing[0]}"
            )
        return ""

    @property
    def is_conformance_run(self) -> bool:
        """Whether cases were selected or asked for; a run of a project's ordinary tests alone is none."""
        option = self._config.option
        return bool(self.progress.selected or option.shardproof_impl or self.journal is not None)

    def asked_nothing(self) -> list[str]:
        """Return the implementations on which no case ran."""
        return self.progress.asked_nothing(self.selection.implementations)


def _ids(items: Iterable[pytest.Function]) -> Selected:
    ids: Selected = {}
    for item in items:
        ids.setdefault(cases.launch_of(item).implementation, []).append(cases.case_id(item))
    return ids


def _hash_of_suites(files: dict[str, pathlib.Path]) -> str:
    """Return the hash of the files with the cases of a run, by the beginnings of their ids.

    shardproof's own suites count as a whole, so that runs of different chapters have one hash.
    """
    own = {name: path for name, path in files.items() if not packaged.is_suites(path.parent)}
    return origin.hash_of(own if len(own) == len(files) else own | packaged.files())


def _key(item: pytest.Function) -> tuple[str, str]:
    return cases.launch_of(item).implementation, cases.case_id(item)


def _file(case_id: str) -> str:
    return case_id.partition("::")[0]


STATE = pytest.StashKey[State]()
"""The key of the state in pytest's configuration."""
