"""Runs that torchrun started: rank 0 is the controller, and each other process a silent supervisor of ranks."""

import pathlib
from collections.abc import Generator

import pytest

from shardproof.harness.judging.texts import rank_count
from shardproof.harness.plugin import command_line
from shardproof.harness.plugin.packaged import is_suites
from shardproof.harness.worlds.torchrun import meeting, supervisor
from shardproof.harness.worlds.torchrun.fleet import Fleet
from shardproof.harness.worlds.torchrun.meeting import JobProcess

FLEET = pytest.StashKey[Fleet]()
"""The key of the job's processes in the configuration of its controller."""


def register(manager: pytest.PytestPluginManager) -> None:
    """Take part in a job of torchrun, if there is one and this run is of shardproof."""
    process = meeting.this_process()
    if process is not None:
        manager.register(_Controller(process) if process.is_controller else _Supervisor(process))


class _Controller:
    """Finds the other processes of the job before the run, and ends them with the exit code of the run."""

    def __init__(self, process: JobProcess) -> None:
        self._process = process

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
            fleet = config.stash[FLEET] = Fleet(self._process)
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
        process = self._process
        hosts = f"{process.nodes} host{'s' * (process.nodes > 1)}"
        attempt = f", attempt {process.attempt + 1}" if process.attempt else ""
        return f"torchrun: {rank_count(process.size)} on {hosts}{attempt}" if FLEET in config.stash else ""


class _Supervisor:
    """Serves the controller in place of a run of its own."""

    def __init__(self, process: JobProcess) -> None:
        self._process = process

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int | None:
        if not _is_ours(config):
            return None
        if _asked_workers(config):  # which the controller refuses
            return pytest.ExitCode.USAGE_ERROR
        return supervisor.main(self._process)


def end_for_a_restart(item: pytest.Item, *, has_journal: bool) -> None:
    """End the run after this case if a host is lost and torchrun may restart the job, which then goes on from here.

    Without a restart the cases that the ranks that are left can run still run. Without a journal the next attempt would
    begin anew.
    """
    fleet = item.config.stash.get(FLEET, None)
    if fleet is not None and fleet.lost and has_journal and fleet.process.may_restart:
        item.session.shouldstop = f"{fleet.lost[0]}; torchrun restarts the job"


def _is_ours(config: pytest.Config) -> bool:
    """Whether shardproof was asked to run: other projects start tests of their own with torchrun."""
    if command_line.asks_for_a_run(config):
        return True
    paths = (pathlib.Path(str(argument).partition("::")[0]) for argument in config.args)
    return any(is_suites(path if path.is_dir() else path.parent) for path in paths)


def _asked_workers(config: pytest.Config) -> str:
    """Return what was given for ``-n``; "" if it was not, or was 0."""
    asked = getattr(config.option, "numprocesses", None)
    return str(asked) if asked else ""
