"""Simulation and reality agree: the collectives, the layouts and the optimizer's state of a rank, exactly."""

import dataclasses
import os
from typing import Any

import pytest

from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.inner import ROOT, name_of, run_cases

pytestmark = pytest.mark.sampled

SUITE = "suites/test_simulation.py"


def verdicts(records):
    return {(record["id"].partition("::")[2], record["implementation"]): record["verdict"] for record in records}


@pytest.mark.nightly
def test_ranks_of_real_worlds_with_all_settings(tmp_path):
    names = ["reference", "reference.flat", "torch.fully_shard", "torch.fsdp"]
    records, _ = run_cases(tmp_path, names, "tests/harness/simulated_cases.py", code=0)
    assert set(verdicts(records).values()) == {"pass", "unsupported"}
    assert sum(record["verdict"] == "pass" for record in records) >= 40


@pytest.mark.nightly
def test_ordinary_runs_leave_simulated_cases_out(tmp_path):
    """And runs of simulated worlds leave all others out; N that a mesh does not divide into is unmet."""
    run_cases(tmp_path, ["reference"], SUITE, code=5)
    chosen = (SUITE, "--simulate", "12", "-k", "test_bytes_of_a_step or eight")
    records, _ = run_cases(tmp_path, ["reference", "ddp"], *chosen, code=6)  # no case ran on ddp
    assert verdicts(records) == {
        ("test_bytes_of_a_step[s12]", "reference"): "pass",
        ("test_resharded_to_eight[s12]", "reference"): "unmet",
        ("test_bytes_of_a_step[s12]", "ddp"): "unsupported",
        ("test_resharded_to_eight[s12]", "ddp"): "unmet",
    }
    missing = {record["missing"][0] for record in records if record["missing"]}
    assert "a simulated world whose size is a multiple of 8 (not 12)" in missing
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
    chosen = (SUITE, "--simulate", "8", "-k", "test_bytes_of_a_step")
    (failed, skipped), _ = run_cases(tmp_path, [known, untried], *chosen, code=1)
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
    chosen = (path, "-k", "plain and w2", "--rootdir", tmp_path, "-c", os.devnull)
    records, _ = run_cases(tmp_path, ["reference"], *chosen, code=1)
    assert "step 0: simulated [('forward', 'all_gather', 'float32'" in records[0]["failure"]["text"]
