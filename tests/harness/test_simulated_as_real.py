"""Simulation and reality agree: the collectives, the layouts and the optimizer's state of a rank, exactly."""

import dataclasses
import json
import os
from typing import Any

import pytest

from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.inner import NO_HYPOTHESIS, ROOT, name_of, python

# Each test starts processes.
pytestmark = pytest.mark.sampled


def run(folder, implementations, *options, cases="tests/harness/simulated_cases.py"):
    """Run cases; returns the exit code, the records and what was printed."""
    report = folder / "run.json"
    options = (*options, "--impl", implementations, "--device", "cpu", "--report", report)
    done = python("-m", "pytest", "-p", "no:cacheprovider", *NO_HYPOTHESIS, "-q", cases, *options, timeout=900)
    records = json.loads(report.read_text())["cases"] if report.exists() else []
    return done.returncode, records, done.stdout + done.stderr


def verdicts(records):
    return {(record["id"].partition("::")[2], record["implementation"]): record["verdict"] for record in records}


@pytest.mark.nightly
def test_ranks_of_real_worlds_with_all_settings(tmp_path):
    code, records, output = run(tmp_path, "reference,reference.flat,torch.fully_shard,torch.fsdp")
    assert code == 0, output
    assert set(verdicts(records).values()) == {"pass", "unsupported"}
    assert sum(record["verdict"] == "pass" for record in records) >= 40


def test_ordinary_runs_leave_simulated_cases_out(tmp_path):
    """And runs of simulated worlds leave all others out; N that a mesh does not divide into is unmet."""
    suites = "suites/test_simulation.py"
    assert run(tmp_path, "reference", cases=suites)[0] == 5
    (tmp_path / "both").mkdir()
    chosen = ("--simulate", "12", "-k", "test_bytes_of_a_step or eight")
    code, records, output = run(tmp_path / "both", "reference,ddp", *chosen, cases=suites)
    assert code == 6, output  # no case ran on ddp
    assert verdicts(records) == {
        ("test_bytes_of_a_step[s12]", "reference"): "pass",
        ("test_resharded_to_eight[s12]", "reference"): "unmet",
        ("test_bytes_of_a_step[s12]", "ddp"): "unsupported",
        ("test_resharded_to_eight[s12]", "ddp"): "unmet",
    }
    missing = {record["missing"][0] for record in records if record["missing"]}
    assert "a simulated world of a multiple of 8 ranks (12 is none)" in missing
    assert any(line.startswith("it cannot be simulated: RuntimeError: ") for line in missing)
    assert {record["world"] for record in records} == {12}


class Raising(ReferenceAdapter):
    """It is known to run in simulated worlds; of the one below nothing is known."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of this implementation")


class RaisingUntried(Raising):
    traits = dataclasses.replace(Raising.traits, simulates=False)


def test_error_of_what_is_known_to_run_is_a_failure(tmp_path):
    """Of what is not known to run, an error may be due to what a simulation lacks."""
    known, untried = map(name_of, (Raising, RaisingUntried))
    chosen = ("--simulate", "8", "-k", "test_bytes_of_a_step")
    code, records, output = run(tmp_path, f"{known},{untried}", *chosen, cases="suites/test_simulation.py")
    assert code == 1, output
    failed, skipped = records
    assert (failed["implementation"], failed["verdict"]) == (known, "fail")
    assert "RuntimeError: a bug of this implementation" in failed["failure"]["text"]
    assert (skipped["implementation"], skipped["verdict"]) == (untried, "unsupported")
    assert skipped["missing"] == ["it cannot be simulated: RuntimeError: a bug of this implementation"]


@pytest.mark.nightly
def test_what_does_not_agree_fails(tmp_path):
    """A simulated rank whose trace differs from the real one's, here because it shards another model."""
    cases = (ROOT / "tests/harness/simulated_cases.py").read_text()
    old = "functools.partial(Rows, size), mesh=simulated"
    assert cases.count(old) == 1
    path = tmp_path / "test_other.py"
    path.write_text(cases.replace(old, "functools.partial(Rows, size + 4), mesh=simulated"))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["shardproof.plugin"]\n')
    code, records, output = run(
        tmp_path, "reference", "-k", "plain and w2", "--rootdir", str(tmp_path), "-c", os.devnull, cases=str(path)
    )
    assert code == 1, output
    assert "step 0: simulated [('forward', 'all_gather', 'float32'" in records[0]["failure"]["text"]
