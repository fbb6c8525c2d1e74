"""``python -m benchmarks plan``: how it prints what was planned and measured, and that collectives are the same."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

ROOT = Path(__file__).parents[1]

specification = importlib.util.spec_from_file_location("benchmarks_plan", ROOT / "benchmarks/plan.py")
benchmark = importlib.util.module_from_spec(specification)
specification.loader.exec_module(benchmark)

ROWS = [["shard", "all_gather", "float32", 3, 3000], ["shard", "reduce_scatter", "float32", 2, 2000]]
PLAN = {"peaks": {"between steps": 100 << 20, "backward": 312 << 20}, "traffic": ROWS}
MEASURED = {
    "peaks": {"between steps": 100 << 20, "backward": 300 << 20},
    "allocated": {"between steps": 101 << 20, "backward": 306 << 20},
    "workspaces": {"cublas": 32 << 20, "outside": 500 << 20},
    "traffic": ROWS,
}


def shown(plan, measured):
    return benchmark.table({"implementation": "x", "dtype": "float32", "plan": plan, "measured": measured})


def test_a_training_beside_its_plan():
    assert_expected_inline(
        shown(PLAN, MEASURED),
        """\

x, float32
  peak, MiB          planned    measured  difference   in blocks
  between steps        100.0       100.0      +0.00%       101.0
  backward             312.0       300.0      +4.00%       306.0
  apart: cuBLAS 32.0 MiB; context, libraries and other processes 500.0 MiB
  collectives: 5 with 5,000 B, as planned
""",
    )


def test_other_collectives_than_planned_are_named():
    other = MEASURED | {"traffic": [ROWS[0], ["shard", "reduce_scatter", "bfloat16", 2, 1000]]}
    assert_expected_inline(
        shown(PLAN, {"traffic": other["traffic"]}),
        """\

x, float32
  collectives: 5 with 4,000 B, PLANNED OTHERWISE
    planned  ['shard', 'reduce_scatter', 'float32', 2, 2000]
    measured ['shard', 'reduce_scatter', 'bfloat16', 2, 1000]
""",
    )


def test_what_failed_says_so_and_what_did_not_is_shown():
    assert_expected_inline(
        shown({"failed": "one line"}, MEASURED),
        """\

x, float32
  the plan failed: one line
  peak, MiB          planned    measured  difference   in blocks
  between steps                    100.0                   101.0
  backward                         300.0                   306.0
  apart: cuBLAS 32.0 MiB; context, libraries and other processes 500.0 MiB
""",
    )


@pytest.mark.nightly
def test_rank_of_a_world_that_is_not_there_issues_what_was_planned(tmp_path):
    arguments = ["--model", "tests.harness.planned_models:llama", "--sequence", "16", "--mesh", "2x2"]
    command = [sys.executable, "-m", "benchmarks", "plan", *arguments, "--backend", "fake", "--json", tmp_path / "x"]
    command += ["--implementations", "reference,torch.fsdp", "--dtypes", "bfloat16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "x").read_text())["rows"]
    assert len(rows) == 2
    assert all(row["plan"]["traffic"] == row["measured"]["traffic"] != [] for row in rows), done.stdout
