"""``python -m benchmarks reference`` and ``plan``: what they measure of a small model, and how they print figures."""

import importlib.util
import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from packaging.version import Version

from tests.harness.inner import ROOT, python

pytestmark = pytest.mark.sampled


def benchmark_of(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / f"benchmarks/{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[f"benchmarks_{name}"] = module
    specification.loader.exec_module(module)
    return module


benchmark, plan = map(benchmark_of, ("reference", "plan"))
traced = importlib.import_module("training.traced")  # whose folder the benchmark has put on the path

#: In torch 2.11 the fake group leaves the output of a reduce-scatter as it was allocated: losses are what lay there.
FAKE_REDUCES = Version(torch.__version__) >= Version("2.13")


def run(*arguments: str | pathlib.Path, code: int | None = None) -> subprocess.CompletedProcess[str]:
    return python("-m", "benchmarks", *arguments, code=code)


@pytest.mark.nightly
def test_two_implementations_side_by_side(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "reference.json"
    options = ["--backend", "fake", "--device", "cpu", "--models", "tiny,tiny-small"]
    options += ["--rounds", "2", "--steps", "3"]
    done = run("reference", *options, "--implementations", "reference,torch.fully_shard", "--json", file, code=0)
    found = json.loads(file.read_text())
    rows = found["about"]["rows"]
    assert [row["model"] for row in rows] == ["2 x 32", "2 units of 4 small parameters"]
    assert found["left_out"] == []
    for row in rows:
        ours, theirs = row["implementations"]["reference"], row["implementations"]["torch.fully_shard"]
        for one in (ours, theirs):
            assert [len(each["ms"]) for each in one["rounds"]] == [3, 3]
            times = [pair for each in one["rounds"] for pair in zip(each["host_ms"], each["ms"], strict=True)]
            assert all(0 < host < whole for host, whole in times)
        assert len(ours["losses"]) == len(theirs["losses"]) == 50
        if FAKE_REDUCES:
            assert ours["losses"] == theirs["losses"]
            assert ours["losses"][0] != ours["losses"][-1]
    assert "largest relative difference to torch.fully_shard: reference " in done.stdout
    assert not FAKE_REDUCES or "torch.fully_shard: reference 0.0e+00" in done.stdout


@pytest.mark.nightly
def test_what_cannot_be_measured_is_named(tmp_path: pathlib.Path) -> None:
    options = ["--backend", "fake", "--device", "cpu", "--rounds", "1", "--steps", "1"]
    options += ["--implementations", "reference.flat"]
    done = run("reference", *options, "--models", "tiny,replicas", "--seconds", "0.01", code=0)
    assert "left out after 0.01 s: 2 x 32, 48 x 256, replicas of one shard" in done.stdout


def test_a_process_that_dies_is_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = benchmark.RankProcesses("no-such-backend", "none", "cpu", 2, tmp_path)
    assert ranks.answers() == []
    assert ranks.failed is not None and "none" in ranks.failed
    assert ranks.ask(do="drop") == []  # and nothing waits for it any more
    ranks.close()
    assert "no-such-backend failed" in capsys.readouterr().err


def measured(ms: float, host: float, allocated: int, losses: list[float]) -> dict[str, Any]:
    rounds = [{"ms": [ms, ms + 2, ms + 1], "host_ms": [host] * 3, "cpu_ms": [host] * 3} for _ in range(2)]
    rounds[1]["ms"] = [2 * one for one in rounds[1]["ms"]]
    peak = {"allocated": allocated << 20, "reserved": (allocated + 8) << 20}
    return {"rounds": rounds, "peak": peak, "losses": losses}


def test_the_table() -> None:
    implementations = {
        "reference": measured(10, 8, 90, [2.0, 1.0]),
        "torch.fully_shard": measured(20, 16, 100, [2.0, 1.01]),
        "ddp": {"failed": "it has no memory left"},
        "reference.flat": {"unsupported": "it has one shard"},
    }
    row = {"model": "a model", "units": 4, "host": "host_ms", "limits": {"compute": 8.0, "optimizer": 2.0}}
    assert_expected_inline(
        benchmark.table(row | {"implementations": implementations}),
        """\
a model: 4 units
implementation                  ms a step    host  us/unit      MiB  reserved              time  host   peak  limit
reference                16.0 (11.0-22.0)     8.0     2000     90.0      98.0  0.52 (0.52-0.52)  0.50  0.900   1.60
torch.fully_shard        31.0 (21.0-42.0)    16.0     4000    100.0     108.0                                  3.10
ddp                    it has no memory left
reference.flat         it has one shard
limits, ms: compute 8.0, optimizer 2.0
losses of 2 steps, largest relative difference to torch.fully_shard: reference 9.9e-03
""",
    )


def test_names_that_do_not_exist_are_refused() -> None:
    done = run("reference", "--models", "large,huge")
    assert done.returncode == 2 and "'huge' is none of large, deep, small" in done.stderr


# The plan beside what was measured, and that collectives are the same

ROWS = [["shard", "all_gather", "float32", 3, 3000], ["shard", "reduce_scatter", "float32", 2, 2000]]
PLAN = {"peaks": {"between steps": 100 << 20, "backward": 312 << 20}, "traffic": ROWS}
MEASURED = {
    "peaks": {"between steps": 100 << 20, "backward": 300 << 20},
    "allocated": {"between steps": 101 << 20, "backward": 306 << 20},
    "workspaces": {"cublas": 32 << 20, "outside": 500 << 20},
    "traffic": ROWS,
}


def shown(planned, measured):
    return plan.table({"implementation": "x", "dtype": "float32", "plan": planned, "measured": measured})


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


def test_other_collectives_than_planned_and_what_failed_are_named():
    other = ["shard", "reduce_scatter", "bfloat16", 2, 1000]
    assert shown(PLAN, {"traffic": [ROWS[0], other]}).splitlines()[2:] == [
        "  collectives: 5 with 4,000 B, PLANNED OTHERWISE", f"    planned  {ROWS[1]}", f"    measured {other}",
    ]  # fmt: skip
    lines = shown({"failed": "one line"}, MEASURED).splitlines()
    assert lines[2] == "  the plan failed: one line" and "apart: cuBLAS" in lines[-1]
    assert lines[4].split() == ["between", "steps", "100.0", "101.0"], "what did not fail is shown"


@pytest.mark.nightly
def test_rank_of_a_world_that_is_not_there_issues_what_was_planned(tmp_path):
    arguments = ["--model", "tests.harness.planned_models:llama", "--sequence", "16", "--mesh", "2x2"]
    arguments += ["--implementations", "reference,torch.fsdp", "--dtypes", "bfloat16"]
    done = run("plan", *arguments, "--backend", "fake", "--json", tmp_path / "x", code=0)
    rows = json.loads((tmp_path / "x").read_text())["rows"]
    assert len(rows) == 2
    assert all(row["plan"]["traffic"] == row["measured"]["traffic"] != [] for row in rows), done.stdout


def test_collectives_that_compute_does_not_hide() -> None:
    def event(stream: int, name: str, start: int, end: int, *, marked: bool = False) -> Any:
        return SimpleNamespace(
            device_type=lambda: torch.autograd.DeviceType.CUDA, device_resource_id=lambda: stream, name=lambda: name,
            start_ns=lambda: start * 10**6, duration_ns=lambda: (end - start) * 10**6,
            is_user_annotation=lambda: marked,
        )  # fmt: skip

    events = [
        event(7, "gemm", 11, 14),
        event(20, "cast", 10, 11),
        event(20, "ncclDevKernel_AllGather", 11, 15),
        event(20, "FSDP::gather", 11, 15, marked=True),
        event(21, "ncclDevKernel_ReduceScatter", 14, 16),
        event(7, "gemm", 15, 17),
    ]
    found = traced.spans(events)
    kinds = [(0, 1, "copy"), (1, 4, "compute"), (1, 5, "gather"), (4, 6, "reduce"), (5, 7, "compute")]
    assert sorted((span.start, span.end, span.kind) for span in found) == kinds
    assert traced.exposed(found) == {"step": 7, "compute": 5, "collectives": 5, "exposed": 1}
    drawn = traced.picture("a <model>", {"reference": found})
    assert drawn.count('height="16"') == 5
    assert "reference: step 7.0 ms, compute 5.0 ms, collectives 5.0 ms, exposed 1.0 ms" in drawn
    assert "a &lt;model&gt;" in drawn
