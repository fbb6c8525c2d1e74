"""A command of the warm Python behaves as in an interpreter of its own, and begins with nothing of this run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from tests import warm


def run(*arguments, **options):
    """Run a command of the warm Python, and return what came of it."""
    return subprocess.run([warm.python(), *arguments], capture_output=True, text=True, **options)


SHOWN = """
import json, os, sys, tempfile
print(json.dumps([sys.argv, sys.path[:2], os.getcwd(), dict(os.environ), tempfile.gettempdir(), __name__]))
"""


def test_arguments_environment_and_directory_are_those_of_the_command(tmp_path):
    environment = {"PYTHONPATH": "/somewhere", "TMPDIR": str(tmp_path), "A_VARIABLE": "1"}
    done = run("-c", SHOWN, "x", cwd=tmp_path, env=environment)
    real = subprocess.run([sys.executable, "-c", SHOWN, "x"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert json.loads(done.stdout) == json.loads(real.stdout)


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("pass", (0, "", "")),
        ("import sys; sys.exit(3)", (3, "", "")),
        ("raise SystemExit('a reason')", (1, "", "a reason\n")),
        ("import os; os.kill(os.getpid(), 9)", (-signal.SIGKILL, "", "")),
        ("import atexit; atexit.register(print, 'last'); print('first')", (0, "first\nlast\n", "")),
        ("print(input())", (0, "given\n", "")),
    ],
    ids=["end", "code", "text", "signal", "atexit", "input"],
)
def test_the_command_ends_as_itself(code, ending):
    done = run("-c", code, input="given\n")
    assert (done.returncode, done.stdout, done.stderr) == ending


def test_an_exception_is_printed():
    done = run("-c", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_nothing_of_this_project_or_of_pytests_plugins_is_imported():
    done = run("-c", "import json, sys; print(json.dumps([*sys.modules]))")
    packages = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert {"torch", "pytest"} <= packages
    assert not packages & {"shardproof", "fsdp_impl", "tests", "suites", "harness", "xdist", "conftest"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(number):
    # Blocked, so that the signal is kept until the command waits for it: a handler in Python does not run, and the
    # command does not end, if the signal comes between the last look at signals and a read that blocks.
    blocked = "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, (1, 2, 15))\n"
    code = f"{blocked}print(flush=True)\nsys.exit(signal.sigwait((1, 2, 15)))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([warm.python(), "-c", code], **pipes) as process:
        try:
            process.stdout.readline()
            process.send_signal(number)
            assert process.wait(30) == number
        finally:
            process.kill()


def test_a_command_whose_launcher_is_killed_ends():
    code = "import os; print(os.getpid(), flush=True); input()"
    with subprocess.Popen([warm.python(), "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        command = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        ended, _, _ = select.select([command], [], [], 30)
        os.close(command)
        assert ended, "its input is still open"
