"""Runs that torchrun started: rank 0 is the controller, and each other process a silent supervisor of ranks."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from typing import Any

import pytest

from shardproof import folders
from shardproof.door import PARTIAL, content
from shardproof.harness.plugin import cases, drawing, options
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.selection import is_suites
from shardproof.harness.verdicts.texts import rank_count
from shardproof.harness.worlds.torchrun import meeting, supervisor
from shardproof.harness.worlds.torchrun.fleet import Fleet
from shardproof.harness.worlds.torchrun.fleet_pool import FleetPool
from shardproof.harness.worlds.torchrun.meeting import Place

FLEET = pytest.StashKey[Fleet]()
"""The key of the job's processes in the configuration of its controller."""


def register(manager: pytest.PytestPluginManager) -> None:
    """Take part in a job of torchrun, if there is one and this run is of shardproof."""
    place = meeting.place()
    if place is not None:
        manager.register(_Controller(place) if place.is_controller else _Supervisor(place))


class _Controller:
    """Finds the other processes of the job before the run, and ends them with the exit code of the run."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(
        self, config: pytest.Config
    ) -> Generator[None, pytest.ExitCode | int | None, pytest.ExitCode | int | None]:
        if not _is_ours(config):
            return (yield)
        if workers := _asked_workers(config):
            raise pytest.UsageError(
                f"-n {workers}: torchrun has started the processes of this run; xdist's workers cannot share them, so "
                "leave out -n"
            )
        try:
            fleet = config.stash[FLEET] = Fleet(self._place)
        except OSError as error:
            raise pytest.UsageError(f"the job of torchrun cannot start: {error}") from None
        code: pytest.ExitCode | int | None = pytest.ExitCode.INTERNAL_ERROR
        try:
            code = yield
            return code
        finally:
            fleet.close(int(code or 0))

    def pytest_report_header(self, config: pytest.Config) -> str:
        """Name the job."""
        place = self._place
        hosts = f"{place.nodes} host{'s' * (place.nodes > 1)}"
        attempt = f", attempt {place.attempt + 1}" if place.attempt else ""
        return f"torchrun: {rank_count(place.size)} on {hosts}{attempt}" if FLEET in config.stash else ""


class _Supervisor:
    """Serves the controller in place of a run of its own."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int | None:
        if not _is_ours(config):
            return None
        if _asked_workers(config):  # which the controller refuses
            return pytest.ExitCode.USAGE_ERROR
        return supervisor.main(self._place)


def end_for_a_restart(item: pytest.Item, *, has_journal: bool) -> None:
    """End the run after this case if a host is lost and torchrun may restart the job, which then goes on from here.

    Without a restart the cases that the ranks that are left can run still run. Without a journal the next attempt would
    begin anew.
    """
    fleet = item.config.stash.get(FLEET, None)
    if fleet is not None and fleet.lost and has_journal and fleet.place.may_restart:
        item.session.shouldstop = f"{fleet.lost[0]}; torchrun restarts the job"


def _is_ours(config: pytest.Config) -> bool:
    """Whether shardproof was asked to run: other projects start tests of their own with torchrun."""
    if options.asks_for_a_run(config):
        return True
    paths = (pathlib.Path(str(argument).partition("::")[0]) for argument in config.args)
    return any(is_suites(path if path.is_dir() else path.parent) for path in paths)


def _asked_workers(config: pytest.Config) -> str:
    """Return what was given for ``-n``; "" if it was not, or was 0."""
    asked = getattr(config.option, "numprocesses", None)
    return str(asked) if asked else ""


# Runs cases of a torchrun job on ranks that the current case leaves, ahead of pytest, which asks for one at a time.

#: Seconds after which ranks that have started meanwhile are ended too.
_ABORT_SECONDS = 0.2

#: Marks by which pytest itself may decide that a case does not run.
_DECIDED_BY_PYTEST = ("skip", "skipif", "xfail", "usefixtures")


class Ahead:
    """Runs the cases of a session, several at once where their worlds share no rank.

    The items come in the order in which pytest asks for them; ``run`` is called in threads.
    """

    def __init__(
        self,
        items: Sequence[pytest.Item],
        fleet: Fleet,
        pool: FleetPool,
        *,
        run: Callable[[pytest.Function], MadeRecord],
        may_run: Callable[[pytest.Function], bool],
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._run = run
        self._may_run = may_run
        self._items = items
        self._positions = {item.nodeid: position for position, item in enumerate(items)}
        self._next = 0
        self._threads = ThreadPoolExecutor(fleet.size, thread_name_prefix="shardproof case")
        self._started: dict[str, tuple[int, Future[MadeRecord]]] = {}

    def run(self, item: pytest.Function) -> MadeRecord:
        """Return the record of the case that pytest runs next, and start others that can run at the same time."""
        if item.nodeid not in self._started:  # also if a plugin runs the case once more
            self._start(item)
        # pytest may have passed others without asking, as those that were skipped in their setup.
        self._next = max(self._next, self._positions[item.nodeid] + 1)
        _, mine = self._started[item.nodeid]
        is_alone = item.get_closest_marker("alone") is not None
        try:
            while not mine.done():
                if not is_alone:
                    self._start_others()
                concurrent.futures.wait(self._running, return_when=FIRST_COMPLETED)
        except BaseException:
            # Something in this process ended the wait, such as a timeout. What runs beside is not to blame for the end
            # of its ranks: it runs again when pytest asks for it.
            self._abort()
            raise
        del self._started[item.nodeid]
        return mine.result()

    def close(self) -> None:
        """End the cases for which pytest does not ask any more."""
        self._abort()
        self._threads.shutdown(cancel_futures=True)

    @property
    def _running(self) -> list[Future[MadeRecord]]:
        return [future for _, future in self._started.values() if not future.done()]

    def _abort(self) -> None:
        running = self._running
        if running:
            for future in running:
                future.cancel()
            # Again and again: a case may still be about to start its ranks, and would then run to its end.
            self._pool.abort()
            while concurrent.futures.wait(running, timeout=_ABORT_SECONDS).not_done:
                self._pool.abort()
        self._started = {nodeid: one for nodeid, one in self._started.items() if one[1] not in running}

    def _start(self, item: pytest.Function) -> None:
        self._started[item.nodeid] = (cases.launch_of(item).size, self._threads.submit(self._run, item))

    def _start_others(self) -> None:
        """Start the next cases, in their order, as long as there are ranks for them."""
        while self._next < len(self._items):
            item = self._items[self._next]
            if not cases.is_case(item) or not self._can_start(item):
                return
            if item.nodeid not in self._started:
                self._start(item)
            self._next += 1

    def _can_start(self, item: pytest.Function) -> bool:
        # What has been run and not been asked for is lost if the run ends.
        if len(self._started) >= self._fleet.size or not self._may_run(item):
            return False
        names = {mark.name for mark in item.iter_markers()}
        if not names.isdisjoint((*_DECIDED_BY_PYTEST, "alone")) or drawing.drawn_parameter(item) is not None:
            return False
        used = sum(size for size, future in self._started.values() if not future.done())
        return used + cases.launch_of(item).size <= self._fleet.left


# What a restarted torchrun job keeps of the attempt before: the records of its cases, and which case was interrupted.
#
# Torch elastic restarts all processes of a job. The new controller reads the journal that the last one left on its
# disk, repeats the records that it finds there instead of running their cases again, and records the case that was
# running then as interrupted. Beside the journal, ``FILE.running`` names the cases that are running.

Key = tuple[str, str]
"""The implementation and the id of a case."""


class Resuming:
    """The earlier attempts of one job, and what the next one has to know of this.

    Attributes:
        records: the records of the earlier attempts, as JSON values.
        interrupted: the cases that were running when the last attempt ended.
        exit_code: that of the run if an earlier attempt has completed it; None otherwise.
    """

    def __init__(self, report: pathlib.Path, place: Place) -> None:
        self._place = place
        target = report.resolve()
        self._partial = target.with_name(target.name + PARTIAL)
        self._earlier = target.with_name(target.name + ".earlier")
        self._running = target.with_name(target.name + ".running")
        self._begun: set[Key] = set()
        self._lock = threading.Lock()
        self.records: dict[Key, dict[str, Any]] = {}
        self.interrupted: set[Key] = set()
        self.exit_code: int | None = None
        for path in (target, self._earlier, self._partial):
            self._read(path)
        if self._partial.exists() and self.records:
            # The new journal takes its place, and has the old records only after pytest has collected.
            os.replace(self._partial, self._earlier)

    def _read(self, path: pathlib.Path) -> None:
        run = read(path)
        if run is None or not self._is_ours(run.get("environment", {}).get("torchrun", {})):
            return
        if run.get("end", {}).get("complete"):
            self.exit_code = int(run["end"]["exit_code"])
            return
        self.records |= {(record["implementation"], record["id"]): record for record in run.get("cases", [])}
        if path == self._partial:
            with contextlib.suppress(OSError, ValueError):
                running = {(name, case) for name, case in json.loads(self._running.read_text())}
                self.interrupted = running - self.records.keys()

    def _is_ours(self, job: dict[str, Any]) -> bool:
        """Whether a run file is of an earlier attempt of this job.

        Torch elastic does not count all restarts, and its ids may be alike; the process of torchrun is one.
        """
        same_agent = job.get("agent") == self._place.agent
        return job.get("run_id") == self._place.run_id and (same_agent or job["attempt"] < self._place.attempt)

    def begin(self, key: Key) -> None:
        """Note that a case is about to run; threads may call this."""
        with self._lock, contextlib.suppress(folders.NotWritten):
            self._begun.add(key)
            folders.write(self._running.parent, {self._running.name: json.dumps(sorted(self._begun))})

    def end(self, key: Key) -> None:
        """Delete the note that a case is running, which its record replaces."""
        with self._lock:
            self._begun.discard(key)

    def forget(self) -> None:
        """Remove the records of earlier attempts, which this attempt's journal has now."""
        self._earlier.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what only a restart needs; the run is complete."""
        self.forget()
        self._running.unlink(missing_ok=True)


def read(path: pathlib.Path) -> dict[str, Any] | None:
    """Read a run file or a journal that ends after any byte; None if there is none, or it is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        run = content(path, is_journal=True)
        return run if isinstance(run, dict) else None
    return None
