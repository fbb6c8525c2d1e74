"""Fixtures that the tests of the harness share."""

import multiprocessing

import pytest

from tests.harness.inner import PYTHONPATH, QUIET, last_error


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest on one case file with these options, in this process unless told otherwise."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)

    def run(source, *options, own_process=False, named=True):
        pytester.path.joinpath("test_inner.py").write_text(source)
        options = options if "--impl" in options or not named else (*options, "--impl", "ddp")
        if own_process:
            return pytester.runpytest_subprocess(*QUIET, *options, timeout=300)
        return pytester.runpytest_inprocess(*QUIET, *options)

    return run


@pytest.fixture
def refused(run):
    """Run pytest on a case file that it must refuse; the one line with which it does."""

    def refused(*arguments, **keywords):
        result = run(*arguments, **keywords)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        return last_error(result)

    return refused


@pytest.fixture
def holding():
    """Start a process that enters a context, of this function, until it is let go; (process, it has, let it go)."""
    processes, started = multiprocessing.get_context("fork"), []

    def start(context):
        entered, release = processes.Event(), processes.Event()

        def hold():
            with context():
                entered.set()
                release.wait(60)

        process = processes.Process(target=hold)
        process.start()
        started.append(process)
        return process, entered, release

    yield start
    for process in started:
        process.kill()
        process.join()
