"""Inner pytest runs on one file of cases: what tests of the plugin share."""

import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

# Imported before the inner runs, which forget the modules that they import: torch cannot be imported twice.
import shardproof.harness.adapters.replicas
import shardproof.harness.models.plain  # noqa: F401

with contextlib.suppress(ImportError):  # not with the torch of tests that need no suite
    importlib.import_module("shardproof.harness.adapters.reference")

ROOT = pathlib.Path(__file__).parents[2]

#: For processes of their own: this clone before everything else, and what the host needs besides.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

#: Without the plugin of hypothesis, whose summary imports all of it, in a fifth of the time of a run of its own.
NO_HYPOTHESIS = ("-p", "no:hypothesispytest")

#: Without the plugin that listens on a port in every run, only to hear of reruns.
QUIET = ("-p", "no:cacheprovider", "-p", "no:rerunfailures", *NO_HYPOTHESIS, "-p", "shardproof.plugin")

CASE = """
from shardproof.testing import world
@world(2)
def test_case(rank):
    {body}
"""

#: A case that passes.
PASSES = CASE.format(body="pass")


def python(*arguments, cwd=ROOT, timeout=300, code=None, executable=sys.executable, **variables):
    """Run a Python with this clone before everything else; returns the completed process, its output as text.

    It must end with this code, if one is given.
    """
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **variables}
    command = [executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def torchrun(ranks, *arguments, **keywords):
    """Run a script, or a module, on so many ranks of this host's processors; returns what :func:`python` does."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return python(*launcher, *arguments, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **keywords)


def run_cases(folder, names, *arguments, device="cpu", timeout=1800, **keywords):
    """Run cases on implementations, as of ``--impl``, in a process of its own, with a run file in this folder.

    Returns their records, and what :func:`python` does, of which the other keywords are.
    """
    report = folder / "run.json"
    options = ["-q", "-p", "no:cacheprovider", *NO_HYPOTHESIS, "--impl", ",".join(names), "--device", device]
    done = python("-m", "pytest", *options, "--report", report, *arguments, timeout=timeout, **keywords)
    return json.loads(report.read_text())["cases"] if report.exists() else [], done


def until(seconds, what):
    """Wait for so many seconds at most until a function returns what is true; returns what it returned last."""
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def name_of(adapter: type) -> str:
    """The name by which ``--impl`` takes an adapter."""
    return f"{adapter.__module__}:{adapter.__name__}"


def error_lines(result):
    """What an inner run says of itself rather than of a test."""
    return [line for line in result.stderr.lines + result.stdout.lines if line.startswith("ERROR: ")]


def last_error(result):
    """The one line after which pytest gave up."""
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    (line,) = error_lines(result)
    return line
