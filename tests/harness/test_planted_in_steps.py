"""Bugs that only several microbatches, replicas or prefetching show are caught by the cases about those."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.harness import planted

ROOT = pathlib.Path(__file__).parents[2]
BUGS = [planted.LonelyReplicas, planted.ReplacedGradient, planted.DeafToPrefetch, planted.ForgottenFlags]
CASES = (
    "test_reduction_waits and root-only-True-None or test_hybrid_parameters_stay_gathered and all-reduce-all "
    "or test_prefetch and test_order"
)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each case says of each bug and of the sound reference: {bug: {case: failure}}."""
    report = tmp_path_factory.mktemp("planted") / "run.json"
    names = ["reference", *(f"tests.harness.planted:{bug.__name__}" for bug in BUGS)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "suites", "-k", CASES]
    command += ["--impl", ",".join(names), "--device", "cpu", "--report", str(report)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    failures = {}
    for case in json.loads(report.read_text())["cases"]:
        name = case["implementation"].rpartition(":")[2]
        failures.setdefault(name, {})[case["id"].partition("::")[2].partition("[")[0]] = case["failure"]
    return failures


def caught(failures, bug):
    return {case: failure["text"] for case, failure in failures[bug.__name__].items() if failure}


def test_the_sound_reference_passes_the_same_cases(failures):
    assert failures["reference"] == {
        "test_reduction_waits": None,
        "test_hybrid_parameters_stay_gathered": None,
        "test_order": None,
    }


def test_replicas_that_do_not_reduce(failures):
    found = caught(failures, planted.LonelyReplicas)
    assert found.keys() == {"test_hybrid_parameters_stay_gathered"}
    assert f"gradient of '{planted.DROPPED_UNIT}.in_proj.bias' at step 0" in found.popitem()[1]


def test_a_gradient_that_is_not_added(failures):
    found = caught(failures, planted.ReplacedGradient)
    assert found.keys() == {"test_reduction_waits"}
    assert "gradient of 'layers.0.in_proj.bias' at step 0" in found.popitem()[1]


def test_units_that_do_not_gather_ahead(failures):
    found = caught(failures, planted.DeafToPrefetch)
    assert found.keys() == {"test_order"}
    assert "[2, 3, 4, 5, 6] == [4, 5, 6, 6, 6]" in found.popitem()[1]


def test_units_that_do_not_wait(failures):
    found = caught(failures, planted.ForgottenFlags)
    assert found.keys() == {"test_reduction_waits", "test_hybrid_parameters_stay_gathered"}
    assert "12 reduce_scatter instead of 10 in backward" in found["test_reduction_waits"]
    assert "all_gather instead of 4 in forward" in found["test_hybrid_parameters_stay_gathered"]
