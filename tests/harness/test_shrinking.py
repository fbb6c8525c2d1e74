"""A search finds planted bugs, hangs and crashes too, and shrinks them; the case that it prints fails alike."""

from __future__ import annotations

import json
import os
import subprocess
from typing import NamedTuple

import pytest

from tests import warm
from tests.harness.inner import PYTHONPATH, ROOT, run_suites

pytestmark = [
    pytest.mark.nightly,
]
pytest.importorskip("hypothesis", reason="cases that draw need hypothesis: pip install '.[fuzz]'")

GRADIENT = "gradient of 'root.parts.0.values' in the {} step"
TO_PASTE = "a case to paste into a file of its own:\n"


class Shrunk(NamedTuple):
    """The verdict on a bug, words of its message, and a part of the training to which it shrinks."""

    verdict: str
    words: str
    training: str


SHRUNK = {
    "forgotten-division": Shrunk("fail", GRADIENT.format("first"), "Training()"),
    "gradient-not-taken": Shrunk("fail", "gradient of 'root.", "Training("),
    "buffer-replaced": Shrunk("fail", GRADIENT.format("first"), "Training(microbatches=2)"),
    "replaced-gradient": Shrunk("fail", GRADIENT.format("first"), "microbatches=2"),
    "unreduced-dropped": Shrunk("fail", GRADIENT.format("first"), "accumulation=Accumulation("),
    "norm-crashes": Shrunk("crash", "SIGABRT", "clip='1'"),
    "norm-hangs": Shrunk("hang", "rank 0 is missing from it", "Training("),
}


def name_of(bug):
    return f"planted.adapters:{bug.replace('-', '_')}"


EACH = pytest.mark.parametrize("bug", SHRUNK)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The records of the drawn case on two ranks, by implementation."""
    names = ["reference", *map(name_of, SHRUNK)]
    found = run_suites(names, "suites/test_drawn.py::test_any_training", "w2", tmp_path_factory.mktemp("drawn"))
    return {case["implementation"]: case for case in found}


def test_the_sound_reference_passes(cases):
    assert cases["reference"]["verdict"] == "pass"


@EACH
def test_bug_is_found_and_shrunk(cases, bug):
    case, expected = cases[name_of(bug)], SHRUNK[bug]
    assert case["verdict"] == expected.verdict
    assert expected.words in case["failure"]["text"]
    assert expected.training in case["failure"]["text"].partition(TO_PASTE)[2]


@EACH
def test_the_printed_case_fails_alike(cases, bug, tmp_path):
    expected = SHRUNK[bug]
    name = name_of(bug)
    path, report = tmp_path / "test_pasted.py", tmp_path / "run.json"
    path.write_text(cases[name]["failure"]["text"].partition(TO_PASTE)[2])
    command = [warm.python(), "-m", "pytest", "-p", "no:cacheprovider", "-p", "shardproof.plugin", "-q", str(path)]
    command += ["--rootdir", str(tmp_path), "--impl", name, "--device", "cpu", "--report", str(report)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    (case,) = json.loads(report.read_text())["cases"]
    assert (case["verdict"], case["requirement"]) == (expected.verdict, "DRAWN-1")
    assert expected.words in case["failure"]["text"]
