"""The hooks of the pytest plugin; the other modules of this room do the work."""

import contextlib
import pathlib
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from _pytest._code.code import Traceback

from shardproof import garbage, torch_versions
from shardproof.harness.plugin import (
    cases,
    changed,
    command_line,
    drawing,
    effort,
    environment,
    explaining,
    live,
    marks,
    options,
    packaged,
    selection,
    terminal,
    torchrun,
    unasked,
)
from shardproof.harness.plugin.packaged import SuiteModule, is_suites
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.signals import EndingSignals
from shardproof.harness.plugin.state import STATE, State
from shardproof.harness.worlds import forkserver, scratch, waiting
from shardproof.runfile import LeftOut, Verdict

# The exit codes of a run beyond pytest's own, which are 0 to 5; docs/run-files.md has the whole table.

#: No case ran on some implementations of the run, because their cases were skipped or deselected; others had cases.
ASKED_NOTHING = 6

#: No case failed, but the run is incomplete, or its run file could not be written.
INCOMPLETE = 7


# Makes one pytest item of a case for each implementation and world, and refuses items that cannot run on ranks.

#: The size in the ids of simulated cases in a run without ``--simulate``.
_DEFAULT_SIZE = 1024


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a function marked with ``@world`` by implementation and world size, before its other parameters.

    One marked with ``@simulated`` is parametrized by the sizes of simulated worlds.
    """
    worlds = metafunc.definition.get_closest_marker("world")
    simulated = metafunc.definition.get_closest_marker("simulated")
    if "rank" not in metafunc.fixturenames or (worlds is None and simulated is None):
        return
    if refusal := _refusal(metafunc.config):  # a run without options, of which nothing is known before
        pytest.fail(refusal, pytrace=False)
    chosen = metafunc.config.stash[STATE].selection
    if simulated is not None:
        # Without --simulate there is an item too, so that known failures find their cases; it is deselected.
        sizes = chosen.simulate or (_DEFAULT_SIZE,)
        launches = [cases.Launch(name, 1, size) for name in chosen.implementations for size in sizes]
    else:
        assert worlds is not None
        launches = [
            cases.Launch(name, size) for name in chosen.implementations for size in worlds.args if chosen.allows(size)
        ]
    metafunc.parametrize("rank", launches, ids=map(str, launches), indirect=True)
    parameter = drawing.drawn_parameter(metafunc.definition)
    if parameter is not None:
        name, kind = parameter
        metafunc.parametrize(name, [drawing.Drawn(kind)], ids=[pytest.HIDDEN_PARAM])


def _refusal(config: pytest.Config) -> str:
    """Return why the installed torch is too old for cases, in one line; empty if it is not, or for a check."""
    return "" if packaged.are_own(config.args) else torch_versions.refusal("a case")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse cases that cannot run on ranks, read the known failures, and deselect cases without a world.

    Raises:
        pytest.UsageError: a case cannot run on ranks, or a file of known failures cannot be read. An xdist worker does
            not raise; it sends the errors to the controller.
    """
    functions = [item for item in items if cases.is_case(item)]
    errors = [error for item in functions if (error := cases.usage_error(item))]
    state = config.stash[STATE]
    if functions:
        # Before anything is deselected, so that entries are matched against all collected cases.
        errors += state.known_failures.read(items)
    errors += _no_world(items, state.selection) if functions or config.option.shardproof_world else []
    if errors:
        state.refuse(config, items, errors)
    simulates = bool(functions) and bool(state.selection.simulate)
    filtered = [item for item in items if _is_filtered_out(item) or _is_of_other_worlds(item, simulates=simulates)]
    state.without_world = [item for item in filtered if _is_filtered_out(item)]
    if filtered:
        config.hook.pytest_deselected(items=filtered)
        left_out = set(filtered)
        items[:] = [item for item in items if item not in left_out]


def _is_filtered_out(item: pytest.Item) -> bool:
    """Return whether ``--world`` left a case with no world; pytest then makes one item whose ``rank`` is no Launch."""
    callspec = getattr(item, "callspec", None)
    marked = item.get_closest_marker("world") is not None
    return marked and callspec is not None and "rank" in callspec.params and not cases.is_case(item)


def _no_world(items: Sequence[pytest.Item], chosen: selection.Selection) -> list[str]:
    """Return why ``--world`` selects none of the collected cases, which are for other numbers of ranks."""
    marks = [item.get_closest_marker("world") for item in items]
    sizes = sorted({size for mark in marks if mark is not None for size in mark.args})
    if chosen.world is None or not sizes or any(map(chosen.allows, sizes)):
        return []
    asked = ",".join(map(str, chosen.world))
    ranks = " or ".join([*filter(None, [", ".join(map(str, sizes[:-1]))]), str(sizes[-1])])
    return [f"--world {asked}: no case that was collected runs on so many ranks; they run on {ranks}"]


def _is_of_other_worlds(item: pytest.Item, *, simulates: bool) -> bool:
    """Return whether an item is a case of simulated worlds in a run of real ones, or the other way round."""
    return cases.is_case(item) and bool(cases.launch_of(item).simulates) != simulates


_RECORD = pytest.StashKey[MadeRecord]()
_SIGNALS = pytest.StashKey[EndingSignals]()

#: The collector of garbage rests until the cases are collected.
_RESTING = pytest.StashKey[contextlib.ExitStack]()

#: The exit code in the journal of a run that ended before pytest had one.
_UNKNOWN = -1


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of a conformance run; none of them affects other tests."""
    command_line.add_prefixed(parser)
    command_line.add_short_forms_last(parser, pluginmanager)
    torchrun.register(pluginmanager)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; with options of a conformance run, check them and start the forkserver early.

    Raises:
        pytest.UsageError: the torch is too old for cases.
    """
    for line in marks.MARKER_LINES:
        config.addinivalue_line("markers", line)
    state = config.stash[STATE] = State(config)
    config.stash[_SIGNALS] = EndingSignals()
    config.stash[_RESTING] = contextlib.ExitStack()
    config.pluginmanager.register(_RunObserver(state, config))
    config.pluginmanager.register(effort.Shortening(state))
    limited = ("changed", "changed_since", "profile")
    if any(getattr(config.option, f"shardproof_{name}") for name in limited):
        config.pluginmanager.register(changed.Ending(lambda: state.selection))
        changed.one_at_a_time(config)
    config.pluginmanager.register(terminal.AlikeFailures())
    config.pluginmanager.register(terminal.AllFailures())
    terminal.show(config)
    if command_line.asks_for_a_run(config):
        if refusal := _refusal(config):
            raise pytest.UsageError(refusal)
        config.stash[_RESTING].enter_context(garbage.resting())
        if _names_are_known(config):
            if sys.stderr.isatty() and not state.is_worker:
                names = config.option.shardproof_impl or ",".join(options.DEFAULT_IMPLEMENTATIONS)
                worlds = f" on worlds of {sizes} ranks" if (sizes := config.option.shardproof_world) else ""
                waiting.tell_on_stderr(f"shardproof: importing torch and collecting the cases for {names}{worlds}")
            # Before a process starts that a signal would leave.
            config.stash[_SIGNALS].install()
            if state.is_worker:  # execnet notices five seconds after the controller was killed
                forkserver.end_with_parent(signal.SIGTERM)
            if not _only_distributes(config) and not config.option.collectonly:
                _start_forkserver()
        config.stash[_SIGNALS].install()
        state.open_journal()
        state.known_failures  # noqa: B018  (checks the options, and the files that they name)
        state.change  # noqa: B018  (likewise)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the files that the run tests, and what a reader must know about the installed torch."""
    return environment.header(config.stash[STATE].selection) if command_line.asks_for_a_run(config) else []


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Print what is about to run; an xdist controller has no items."""
    launches = [cases.launch_of(item) for item in items if cases.is_case(item)]
    if not launches or config.option.verbose < 0:
        return []
    chosen = config.stash[STATE].selection
    ranks = ", ".join(map(str, sorted({one.simulates or one.size for one in launches})))
    what = f"{len(launches)} {'case' if len(launches) == 1 else 'cases'} of {', '.join(chosen.implementations)}"
    return [f"shardproof: {what}; ranks: {ranks}; device: {chosen.device}; {chosen.asked}"]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show a live line, if this run may have one; pytest's own terminal is configured by now."""
    live.register(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the handlers of signals; close a run file that no session has finished."""
    if STATE not in config.stash:  # another plugin's pytest_configure raised before this one's was called
        return
    config.stash[_RESTING].close()
    config.stash[_SIGNALS].restore()
    if config.stash[_SIGNALS].has_ended:
        forkserver.kill()  # which may import torch still, and notices the end of this process afterwards
    state = config.stash[STATE]
    state.finish_journal(reason=state.interruption or "pytest ended before the run did", exit_code=_UNKNOWN)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """The parameter that makes a function a case: a ``Launch`` in the pytest process, a ``Rank`` in each rank."""
    if not hasattr(request, "param"):
        text = "the case takes 'rank', and no @world(...) says on how many ranks it runs, such as @world(2, 4)"
        pytest.fail(f"{request.node.nodeid}: {text}", pytrace=False)
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
def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which cases are selected; in an xdist worker, before xdist tells the controller that it has collected."""
    state = session.config.stash[STATE]
    state.select(session.items)
    session.config.stash[_RESTING].close()
    if state.progress.selected:
        session.config.stash[_SIGNALS].install()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a case on its world; leave any other test function to pytest."""
    if not cases.is_case(pyfuncitem):
        return None
    state = pyfuncitem.config.stash[STATE]
    # Of an earlier attempt, if a plugin runs the case again.
    if _RECORD in pyfuncitem.stash:
        del pyfuncitem.stash[_RECORD]
    made = state.earlier(pyfuncitem) or _run(pyfuncitem, state)
    pyfuncitem.stash[_RECORD] = made
    terminal.add_outputs(pyfuncitem, made.outputs)
    if made.verdict.is_skip:
        pytest.skip(cases.skip_reason(made))
    if made.verdict != Verdict.PASS:
        made.reproduce = state.invocation.command(pyfuncitem, made, state.selection)
    if made.verdict == Verdict.EXPECTED_FAIL:
        pytest.xfail(made.expected)
    if made.verdict != Verdict.PASS:
        pytest.fail(f"{made.verdict}: {made.text}\nreproduce: {made.reproduce}", pytrace=False)
    return True


def _run(item: pytest.Function, state: State) -> MadeRecord:
    """Run a case, and compare its verdict with the known failures."""
    made = state.run(item)
    if not item.config.getoption("runxfail", default=False):
        state.known_failures.judge(item, made)
    if state.selection.explain:
        explaining.explain(item, state.pool, state.selection, made, numbers=state.numbers)
    torchrun.end_for_a_restart(item, has_journal=state.journal is not None)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the record of the case to the report, which also carries it from an xdist worker to the controller."""
    report = yield
    case = item if cases.is_case(item) else None
    made = item.stash.get(_RECORD, None)
    if case is not None and _is_left_out(report, made):
        reason = str(call.excinfo.value) if call.excinfo is not None else ""
        name = cases.launch_of(case).implementation
        vars(report)["shardproof_left_out"] = vars(LeftOut(id=cases.case_id(case), implementation=name, reason=reason))
    elif case is not None and report.when == "call" and (made is not None or report.failed):
        made = case.stash[_RECORD] = _in_agreement(case, report, call, made)
        if made.verdict != Verdict.PASS and not made.verdict.is_skip and not made.reproduce:
            state = item.config.stash[STATE]
            made.reproduce = state.invocation.command(case, made, state.selection)
        terminal.fill_in(report, made)
        terminal.end_with_command(report, made.reproduce)
        # pytest serializes all attributes of a report for the controller, as long as they are plain values.
        vars(report)["shardproof"] = made.as_json()
    return report


def _is_left_out(report: pytest.TestReport, made: MadeRecord | None) -> bool:
    """Whether pytest skipped a case, by a mark or another plugin, before or after the case ran."""
    if not report.skipped or report.when == "teardown":
        return False
    if made is None or report.when == "setup":
        return True
    return made.verdict == Verdict.PASS and not hasattr(report, "wasxfail")


def _in_agreement(
    case: pytest.Function, report: pytest.TestReport, call: pytest.CallInfo[None], made: MadeRecord | None
) -> MadeRecord:
    """Return the record of a case whose call has ended, which never passes where pytest's report fails.

    There is none yet if an exception kept the case from getting one.
    """
    if made is None or (report.failed and call.excinfo is not None and not made.verdict.fails):
        # Raised in this process, by pytest-timeout or another plugin; perhaps after the ranks had answered.
        why = call.excinfo.exconly(tryshort=True) if call.excinfo is not None else "an unknown error"
        return cases.interrupted(case, case.config.stash[STATE].selection, why.splitlines()[0])
    if hasattr(report, "wasxfail"):
        made.verdict = Verdict.EXPECTED_FAIL if report.skipped else Verdict.UNEXPECTED_PASS
    elif report.failed and call.excinfo is None:  # a strict xfail mark
        made.verdict = Verdict.UNEXPECTED_PASS
    return made


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the worlds, judge the run as a whole, and complete the run file."""
    config = session.config
    state = config.stash[STATE]
    state.close()
    if config.option.collectonly:
        return
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        state.note_problems(session)
    if state.errors:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
    elif state.problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if not state.is_worker:
        _judge_the_run(session, state)


def _judge_the_run(session: pytest.Session, state: State) -> None:
    """Set the exit code of a run without failures that asked nothing or is incomplete, and complete the run file."""
    reason = state.why_incomplete(session)
    quiet = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.exitstatus in quiet and state.is_conformance_run:
        if state.progress.selected and reason:
            session.exitstatus = INCOMPLETE
        elif names := state.asked_nothing():
            state.problems.add(f"no case ran on {', '.join(names)}: every case was skipped or deselected")
            # pytest has a code for a run in which nothing ran at all.
            everyone = len(names) == len(state.selection.implementations)
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED if everyone else ASKED_NOTHING
    # pytest, or a worker, has already told the error of a run that could not begin.
    if state.is_conformance_run and reason and session.exitstatus != pytest.ExitCode.USAGE_ERROR:
        state.problems.add(f"the run is incomplete: {reason}")
    is_written = state.finish_journal(reason=reason, exit_code=int(session.exitstatus))
    if not is_written and not reason:
        assert state.journal is not None
        state.problems.add(f"the run file could not be completed: {state.journal.error}")
        if session.exitstatus in quiet:
            session.exitstatus = INCOMPLETE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the errors of the run, the number of verdicts for each implementation, and the path of the run file."""
    state = config.stash[STATE]
    for error in sorted(state.errors | state.problems):
        terminalreporter.write_line(f"ERROR: {error}")
    if state.progress.verdicts:
        terminalreporter.section("shardproof")
        for name in state.selection.implementations:
            counts = [f"{n} {verdict}" for verdict in Verdict if (n := state.progress.verdicts[name, verdict.value])]
            terminalreporter.write_line(f"{name}: {', '.join(counts) or 'no case'}")
        if state.progress.examples:
            terminalreporter.write_line(f"drawn: {state.progress.examples} examples")
        change = state.change[1] if state.change else None
        for line in [*effort.lines(state.selection, state.progress, change), *unasked.lines(state.progress.unasked)]:
            terminalreporter.write_line(line)
    if state.journal is not None:
        if state.journal.partial.exists():
            terminalreporter.write_line(f"incomplete run file: {state.journal.partial}{state.journal.made}")
        else:
            terminalreporter.write_line(f"run file: {config.option.shardproof_report}{state.journal.made}")


#: The name of hypothesis' own plugin.
_HYPOTHESIS = "hypothesispytest"


class _RunObserver:
    """Collects what happens in a run; in an xdist run, the workers' reports arrive in the controller."""

    def __init__(self, state: State, config: pytest.Config) -> None:
        self._state = state
        self._manager = config.pluginmanager
        self._is_traced = config.option.fulltrace
        self._workers: list[subprocess.Popen[bytes]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = getattr(report, "shardproof", None)
        if record is not None:
            self._state.add(record)
        left_out = getattr(report, "shardproof_left_out", None)
        if left_out is not None:
            self._state.progress.left_out.append(left_out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._state.collection_errors += report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._state.interruption = self._state.interruption or str(excinfo.value) or "interrupted by Ctrl-C"
        # xdist asks its workers to end, and execnet interrupts what they run after five seconds.
        for worker in self._workers:
            worker.terminate()
        if not self._is_traced:
            # pytest parses the source of each entry, and prints the line of the last that is not hidden, as those of
            # pytest.exit() are.
            shown = [entry for entry in excinfo.traceback if not entry.ishidden(excinfo)]
            excinfo.traceback = Traceback(shown[-1:] or excinfo.traceback)
        # Its summary imports all of hypothesis, to print what it has seen.
        if "hypothesis" not in sys.modules and self._manager.has_plugin(_HYPOTHESIS):
            self._manager.unregister(name=_HYPOTHESIS)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._state.interruption = f"pytest failed: {excinfo.exconly(tryshort=True)}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self._state.configure_worker(node.workerinput)
        # Private to execnet, which has no public name for the process; a worker on another host has none here.
        if (process := getattr(getattr(node.gateway, "_io", None), "popen", None)) is not None:
            self._workers.append(process)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        self._state.take_selected(node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._state.take_worker_output(getattr(node, "workeroutput", {}))


def _start_forkserver() -> None:
    """Start the forkserver early, so that it imports torch while pytest collects.

    Raises:
        pytest.UsageError: the temporary directory is of no use.
    """
    try:
        forkserver.start()
    except OSError as error:
        where = f"in {scratch.where()}; set TMPDIR to a directory with space and a short path"
        raise pytest.UsageError(f"the forkserver cannot start: {error.strerror or error}, {where}") from None


def _names_are_known(config: pytest.Config) -> bool:
    """Return whether `--impl` has no typo, with which the run ends before anything imports torch."""
    try:
        options.check_names(config.option.shardproof_impl)
    except ValueError:  # the journal has it as the reason why the run is incomplete
        return False
    return True


def _only_distributes(config: pytest.Config) -> bool:
    """Return whether this process is an xdist controller, which runs no tests itself."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
