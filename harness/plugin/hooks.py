"""The hooks of the pytest plugin; the other modules of this room do the work."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Generator
from typing import Any

import pytest

from shardproof.harness.findings.verdict import Verdict
from shardproof.harness.plugin import cases, collection, marks, options
from shardproof.harness.plugin.records import CaseRecord
from shardproof.harness.plugin.run_file import RunFile
from shardproof.harness.plugin.state import STATE, State
from shardproof.harness.plugin.suite_modules import SuiteModule, is_suites
from shardproof.harness.worlds import forkserver

_RECORD = pytest.StashKey[CaseRecord]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of a conformance run; none of them affects other tests."""
    options.add_prefixed(parser)
    options.add_short_forms_last(parser, pluginmanager)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; with options of a conformance run, check them and start the forkserver early."""
    for line in marks.MARKER_LINES:
        config.addinivalue_line("markers", line)
    state = config.stash[STATE] = State(config)
    config.pluginmanager.register(_RecordCollector(state))
    if options.asks_for_a_run(config):
        if not _only_distributes(config):
            forkserver.start()
        state.selection  # noqa: B018  (checks)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """The parameter that makes a function a case: a ``Launch`` in the pytest process, a ``Rank`` in each rank."""
    if not hasattr(request, "param"):
        raise pytest.UsageError(f"{request.node.nodeid}: a case that takes 'rank' needs @world(...) with its sizes")
    return request.param


def pytest_collect_directory(path: pathlib.Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the directory of shardproof's own suites as a plain directory.

    As a package, pytest would import it under a second name.
    """
    return pytest.Dir.from_parent(parent, path=path) if is_suites(path) else None


def pytest_pycollect_makemodule(module_path: pathlib.Path, parent: pytest.Collector) -> pytest.Module | None:
    """Import a file of shardproof's own suites under its one name."""
    return SuiteModule.from_parent(parent, path=module_path) if is_suites(module_path.parent) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item of a case for each implementation and world."""
    collection.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse cases that cannot run on ranks and deselect those that ``--world`` leaves out."""
    collection.check_and_filter(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a case on its world; leave any other test function to pytest."""
    if not cases.is_case(pyfuncitem):
        return None
    state = pyfuncitem.config.stash[STATE]
    state.started += 1
    made = cases.run(pyfuncitem, state.pool, state.selection, number=state.started)
    if not pyfuncitem.config.getoption("runxfail", default=False):
        state.known_failures.judge(pyfuncitem, made)
    pyfuncitem.stash[_RECORD] = made
    for index, output in enumerate(made.outputs):
        if output:
            pyfuncitem.add_report_section("call", f"output of rank {index}", output)
    if made.verdict.is_skip:
        pytest.skip(f"{made.verdict}: {', '.join(made.missing)}")
    if made.verdict == Verdict.EXPECTED_FAIL:
        pytest.xfail(made.expected)
    if made.verdict != Verdict.PASS:
        reproduce = f'reproduce: python -m pytest "{made.nodeid}" --impl {made.implementation} --device {made.device}'
        pytest.fail(f"{made.verdict}: {made.text}\n{reproduce}", pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the record of the case to the report, which also carries it from an xdist worker to the controller."""
    report = yield
    made = item.stash.get(_RECORD, None)
    if made is not None and report.when == "call":
        if hasattr(report, "wasxfail"):
            made.verdict = Verdict.EXPECTED_FAIL if report.skipped else Verdict.UNEXPECTED_PASS
        # pytest serializes all attributes of a report for the controller, as long as they are plain values.
        vars(report)["shardproof"] = made.as_json()
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the worlds and write the run file."""
    config = session.config
    state = config.stash[STATE]
    state.close()
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not config.option.collectonly:
        state.note_problems(session)
    if state.errors:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
    elif state.problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path = config.option.shardproof_report
    if path and not hasattr(config, "workerinput"):
        run_file = state.run_file or RunFile(state.selection, command=sys.argv)
        run_file.write(pathlib.Path(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the errors of the run, the number of verdicts for each implementation, and the path of the run file."""
    state = config.stash[STATE]
    for error in sorted(state.errors | state.problems):
        terminalreporter.write_line(f"ERROR: {error}")
    if not state.verdicts:
        return
    terminalreporter.section("shardproof")
    for name in state.selection.implementations:
        counts = [f"{n} {verdict}" for verdict in Verdict if (n := state.verdicts[name, verdict.value])]
        terminalreporter.write_line(f"{name}: {', '.join(counts) or 'no case'}")
    if config.option.shardproof_report:
        terminalreporter.write_line(f"run file: {config.option.shardproof_report}")


class _RecordCollector:
    """Collects the records of all reports; in an xdist run, the workers' reports arrive in the controller."""

    def __init__(self, state: State) -> None:
        self._state = state

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = getattr(report, "shardproof", None)
        if case is not None:
            self._state.add(case)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._state.take_worker_output(getattr(node, "workeroutput", {}))


def _only_distributes(config: pytest.Config) -> bool:
    """Return whether this process is an xdist controller, which runs no tests itself."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
