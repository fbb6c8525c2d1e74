"""Mistakes that implementations do not refuse: a case finds each, at the stage where it shows."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.harness import naive
from tests.harness.inner import name_of, run_suites

ACCUMULATION = "suites/test_accumulation.py::test_microbatches_add_up"


def needing(module):
    """Skip what needs a package that is not installed."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed; it has a tox environment of its own")


@needing("deepspeed")
@pytest.mark.parametrize(
    ("adapter", "stage", "words"),
    [
        (naive.Zero1AtTheBoundary, "gradient", "diverges from the baseline"),
        # Stage 2 has no gradients then. It raises where they are read, and nowhere else.
        (naive.Zero2AtTheBoundary, None, "Gradients are only available immediately after backward"),
        (naive.Zero3AtTheBoundary, "parameter after step", "diverges from the baseline"),
    ],
)
def test_engine_that_is_stepped_at_the_boundary_alone(adapter, stage, words, tmp_path):
    (case,) = run_suites([name_of(adapter)], ACCUMULATION, "shards-default", tmp_path)
    assert case["verdict"] == "fail", case["failure"]
    assert case["failure"]["stage"] == stage and words in case["failure"]["text"], case["failure"]


@needing("torchtitan")
def test_second_model_of_a_process_has_the_mesh_of_the_first(tmp_path):
    """The model with replicas comes after one without, in the same processes."""
    names = [name_of(naive.SimpleFsdpInSharedProcesses), "torchtitan.simple_fsdp"]
    cases = run_suites(names, ACCUMULATION, "default", tmp_path)
    verdicts = {(case["implementation"] == names[0], "replicas" in case["id"]): case["verdict"] for case in cases}
    assert verdicts == {
        (True, False): "pass", (True, True): "fail", (False, False): "pass", (False, True): "pass",
    }  # fmt: skip


@needing("megatron_fsdp")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_norm_of_gradients_of_which_a_rank_has_no_row(tmp_path):
    """findings/F139.py: the ranks issue different collectives."""
    (case,) = run_suites(
        [name_of(naive.MegatronClippedByTorch)],
        "suites/test_clipping.py::test_total_norm_and_clipped_gradients",
        "w2 and 2.0",
        tmp_path,
        device="cuda",
    )
    # Where the harness sees in time that the ranks are about to issue different collectives, none of them hangs.
    assert case["verdict"] in ("fail", "hang"), case["failure"]["text"]
    assert "clip" in case["failure"]["text"], case["failure"]["text"]


@needing("accelerate")
def test_plain_ddp_that_is_taken_for_fsdp(tmp_path):
    (case,) = run_suites(
        [name_of(naive.AccelerateOnCpu)], "suites/test_autograd.py::test_inputs_by_keyword", "w2", tmp_path
    )
    assert case["verdict"] == "fail", case["failure"]
    assert case["failure"]["stage"] == "sharding", case["failure"]["text"]
    assert "the model is not sharded" in case["failure"]["text"]
