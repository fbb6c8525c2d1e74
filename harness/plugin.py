"""The pytest plugin: options, collection of cases, and their reports. What they mean is elsewhere."""

from __future__ import annotations

import collections
import os
import pathlib
import sys
from collections.abc import Generator
from typing import Any

import pytest

from harness import cases, forkserver, marks, selection
from harness.expecting import RunExpectations
from harness.pool import Pool
from harness.record import CaseRecord, RunFile
from harness.verdict import Verdict

_OPTIONS = ("impl", "device", "world", "report", "deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a conformance run; none of them changes what other tests do."""
    group = parser.getgroup("shardproof", "conformance of sharded data parallel training")
    group.addoption(
        "--impl",
        metavar="NAMES",
        help="comma-separated implementations: built-in names, or module:Class (default: "
        f"{','.join(selection.DEFAULT_IMPLEMENTATIONS)})",
    )
    group.addoption(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where ranks run; auto takes CUDA with NCCL where there are two devices or more, else the CPU with gloo",
    )
    group.addoption("--world", metavar="SIZES", help="run only cases with these numbers of ranks, such as 2,4")
    group.addoption("--report", metavar="FILE", help="write the run file, as JSON, here")
    group.addoption(
        "--check-collectives",
        action="store_true",
        help="stop ranks that are about to issue different collectives on one group, before they block",
    )
    group.addoption("--deadline", type=float, metavar="SECONDS", help="per case (default: 60 on the CPU, 30 on CUDA)")


class State:
    """The plugin's state in one pytest process, made when first needed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._selection: selection.Selection | None = None
        self._pool: Pool | None = None
        self._expectations: RunExpectations | None = None
        self.started = 0
        self.run_file: RunFile | None = None
        self.errors: set[str] = set()
        """Of xdist workers' collections; one process raises its own."""
        self.problems: set[str] = set()
        """Of expectations; they fail the run."""
        self.verdicts: collections.Counter[tuple[str, str]] = collections.Counter()

    @property
    def selection(self) -> selection.Selection:
        """The checked options.

        Raises:
            pytest.UsageError: something asked for cannot exist.
        """
        if self._selection is None:
            option = self._config.option
            try:
                self._selection = selection.resolve(
                    implementations=option.impl,
                    device=option.device,
                    worlds=option.world,
                    deadline=option.deadline,
                    check_collectives=option.check_collectives,
                )
            except ValueError as error:
                raise pytest.UsageError(str(error)) from None
        return self._selection

    @property
    def expectations(self) -> RunExpectations:
        """What the cases of this run are expected to do."""
        if self._expectations is None:
            self._expectations = RunExpectations(self.selection)
        return self._expectations

    @property
    def pool(self) -> Pool:
        """The worlds of this process."""
        if self._pool is None:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
            self._pool = Pool(device_count=self.selection.device_count, worker=int(worker))
        return self._pool

    def close(self) -> None:
        """Stop the worlds, if any were started."""
        if self._pool is not None:
            self._pool.close()

    def note_problems(self, session: pytest.Session) -> None:
        """Ask the expectations what is wrong with them; an xdist worker lets the controller tell."""
        if self._expectations is not None:
            self.problems.update(self._expectations.problems(session.items, session.config))
        if hasattr(session.config, "workerinput"):
            vars(session.config)["workeroutput"][_PROBLEMS] = sorted(self.problems)

    def add(self, case: dict[str, Any]) -> None:
        """Keep a record that a report brought."""
        if self.run_file is None:
            self.run_file = RunFile(self.selection, command=[pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
        self.run_file.cases.append(case)
        self.verdicts[case["implementation"], case["verdict"]] += 1


_ERRORS = "shardproof_usage_errors"
_PROBLEMS = "shardproof_problems"
_STATE = pytest.StashKey[State]()
_RECORD = pytest.StashKey[CaseRecord]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; where a conformance run was asked for, check the options and start early."""
    for line in marks.MARKER_LINES:
        config.addinivalue_line("markers", line)
    state = config.stash[_STATE] = State(config)
    config.pluginmanager.register(_RecordCollector(state))
    option = config.option
    if any(getattr(option, name) not in (None, "auto") for name in _OPTIONS):
        if not _only_distributes(config):
            forkserver.start()
        state.selection  # noqa: B018  (checks)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """The rank that runs the case; stands for the launch in the controller, for a Rank in a rank."""
    if not hasattr(request, "param"):
        raise pytest.UsageError(f"{request.node.nodeid}: a case that takes 'rank' says @world(...) with its sizes")
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each implementation and world, first among the parameters."""
    worlds = metafunc.definition.get_closest_marker("world")
    if "rank" not in metafunc.fixturenames or worlds is None:
        return
    chosen = metafunc.config.stash[_STATE].selection
    launches = [
        cases.Launch(name, size) for name in chosen.implementations for size in worlds.args if chosen.allows(size)
    ]
    metafunc.parametrize("rank", launches, ids=map(str, launches), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse cases that cannot run on ranks; read expectations; drop cases whose every world was filtered out."""
    functions = [item for item in items if isinstance(item, pytest.Function) and cases.is_case(item)]
    errors = [error for item in functions if (error := cases.usage_error(item))]
    if functions:
        # Before anything is deselected, so that entries are matched with every case there is.
        errors += config.stash[_STATE].expectations.read(items)
    if errors:
        _refuse(config, items, errors)
    filtered = [item for item in items if _is_filtered_out(item)]
    if filtered:
        config.hook.pytest_deselected(items=filtered)
        items[:] = [item for item in items if item not in filtered]


def _refuse(config: pytest.Config, items: list[pytest.Item], errors: list[str]) -> None:
    if not hasattr(config, "workerinput"):
        raise pytest.UsageError("\n".join(errors))
    # An xdist worker that raises here looks like a crash: it runs nothing and lets the controller tell.
    vars(config)["workeroutput"][_ERRORS] = errors
    items.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a case on its world; anything else is pytest's."""
    if not cases.is_case(pyfuncitem):
        return None
    state = pyfuncitem.config.stash[_STATE]
    state.started += 1
    made = cases.run(pyfuncitem, state.pool, state.selection, number=state.started)
    if not pyfuncitem.config.getoption("runxfail", default=False):
        state.expectations.judge(pyfuncitem, made)
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
    """Let the report carry the record, across xdist too."""
    report = yield
    made = item.stash.get(_RECORD, None)
    if made is not None and report.when == "call":
        if hasattr(report, "wasxfail"):
            made.verdict = Verdict.EXPECTED_FAIL if report.skipped else Verdict.UNEXPECTED_PASS
        # pytest sends whatever a report has to the controller, as long as it is plain.
        vars(report)["shardproof"] = made.as_json()
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the worlds and write the run file."""
    config = session.config
    state = config.stash[_STATE]
    state.close()
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not config.option.collectonly:
        state.note_problems(session)
    if state.errors:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
    elif state.problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path = config.option.report
    if path and not hasattr(config, "workerinput"):
        run_file = state.run_file or RunFile(state.selection, command=sys.argv)
        run_file.write(pathlib.Path(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The verdicts of each implementation, in one line each."""
    state = config.stash[_STATE]
    for error in sorted(state.errors | state.problems):
        terminalreporter.write_line(f"ERROR: {error}")
    if not state.verdicts:
        return
    terminalreporter.section("shardproof")
    for name in state.selection.implementations:
        counts = [f"{n} {verdict}" for verdict in Verdict if (n := state.verdicts[name, verdict.value])]
        terminalreporter.write_line(f"{name}: {', '.join(counts) or 'no case'}")
    if config.option.report:
        terminalreporter.write_line(f"run file: {config.option.report}")


class _RecordCollector:
    """Keeps the records of all reports; in an xdist run the workers' reports arrive here too."""

    def __init__(self, state: State) -> None:
        self._state = state

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = getattr(report, "shardproof", None)
        if case is not None:
            self._state.add(case)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        said = getattr(node, "workeroutput", {})
        self._state.errors.update(said.get(_ERRORS, ()))
        self._state.problems.update(said.get(_PROBLEMS, ()))


def _only_distributes(config: pytest.Config) -> bool:
    """Whether this process hands all tests to xdist workers."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def _is_filtered_out(item: pytest.Item) -> bool:
    """Whether ``--world`` left a case without any world: pytest then makes one item without a launch."""
    callspec = getattr(item, "callspec", None)
    marked = item.get_closest_marker("world") is not None
    return marked and callspec is not None and "rank" in callspec.params and not cases.is_case(item)
