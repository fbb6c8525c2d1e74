"""`--explain` names the stage, the module and the parameter at which a planted bug shows first."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import pytest

from tests import warm
from tests.harness import explained_cases, planted
from tests.harness import planted_explained as bugs
from tests.harness.inner import PYTHONPATH

pytestmark = pytest.mark.slow(
    "the tests share one run of the cases, in which most planted bugs have ranks of their own"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A bug, the case that it fails, and where `--explain` says that it shows first."""

    bug: type
    case: str
    stage: str
    step: int
    module: str
    parameter: str
    words: str = ""


ROWS = [
    Row(
        planted.ForgottenDivision, "test_tower-w2", "gradient", 0, "out", "out.bias",
        "it is 2 times the oracle's everywhere, as when the division by the 2 ranks is missing",
    ),
    Row(
        planted.DroppedReduction, "test_tower-w2", "gradient", 0, "layers.1.out_proj", "layers.1.out_proj.bias",
        "- backward reduce_scatter layers.1 (of other units: (root), layers.0, layers.2)",
    ),
    Row(planted.LonelyReplicas, "test_replicas-w4", "gradient", 0, "layers.1.out_proj", "layers.1.out_proj.bias"),
    Row(
        bugs.StaleParameters, "test_tower-w2", "gathered parameter", 1, "layers.1.in_proj", "layers.1.in_proj.weight",
        "- forward all_gather layers.1 (of other units: (root), layers.0, layers.2)",
    ),
    Row(bugs.PaddingInShards, "test_tower-w2", "gradient", 0, "layers.1.out_proj", "layers.1.out_proj.bias"),
    Row(
        planted.LocalNorm, "test_clipped-w2", "total norm", 0, "", "",
        "it equals the norm of what this rank alone holds",
    ),
    Row(
        bugs.SkippedUpdate, "test_tied-w2", "parameter after step", 0, "layers.1.first", "layers.1.first.weight",
        "it was updated by: sharded 0, baseline ",
    ),
    Row(
        bugs.FlatSkippedUpdate, "test_tower-w2", "parameter after step", 0, "layers.1.in_proj",
        "layers.1.in_proj.bias",
    ),
    Row(bugs.UnsyncedBuffer, "test_buffers-w2", "buffer", 0, "layers.1", "layers.1.shift"),
    Row(
        bugs.LostCasts, "test_casts-w2", "gathered parameter", 0, "(root)", "gain",
        "has dtype torch.float32; the baseline has torch.bfloat16",
    ),
    Row(
        bugs.WrongShardOrder, "test_tower-w3", "gathered parameter", 0, "layers.1.in_proj", "layers.1.in_proj.weight",
    ),
    Row(planted.ReplacedGradient, "test_accumulated-w2", "gradient", 0, "out", "out.bias"),
    Row(
        bugs.SwappedState, "test_tower-w2", "optimizer state", 0, "layers.0.out_proj", "layers.0.out_proj.bias",
        "'layers.2.out_proj.bias: momentum_buffer'",
    ),
    Row(bugs.WrongModule, "test_tower-w2", "output of a module", 0, "layers.1.in_proj", ""),
    Row(bugs.ScaledAtTheBorder, "test_tower-w2", "gradient of a module's output", 0, "layers.1", ""),
    Row(planted.SecondGather, "test_counted-w2", "", 0, "", "", "+ forward all_gather float32"),
]  # fmt: skip


def explained(names, expression, folder, *options, passes=False):
    """Run the cases with `--explain`; the records, and what pytest printed."""
    report = folder / "run.json"
    command = [warm.python(), "-m", "pytest", "-p", "no:cacheprovider", "-q", explained_cases.__file__]
    command += ["-k", expression, "--impl", ",".join(names), "--device", "cpu", "--report", str(report), *options]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=planted.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == (0 if passes else 1), done.stdout + done.stderr
    return json.loads(report.read_text())["cases"], done.stdout


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory):
    """The records of one run of the cases of all selected bugs."""
    rows = planted.selected(request, "row")
    chosen = [f":{row.bug.__name__}-{size} and {case}" for row in rows for case, _, size in [row.case.partition("-")]]
    names = dict.fromkeys(planted.name_of(row.bug) for row in rows)
    return explained(names, " or ".join(chosen), tmp_path_factory.mktemp("explained"), "--explain")[0]


_BY_DAY = (bugs.StaleParameters, bugs.SkippedUpdate, planted.DroppedReduction)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.bug.name, marks=[] if row.bug in _BY_DAY else [pytest.mark.nightly]) for row in ROWS],
)
def test_named(cases, row):
    (case,) = [case for case in cases if case["implementation"].endswith(f":{row.bug.__name__}")]
    found = case["explanation"]
    assert case["verdict"] == found["again"] == "fail"
    assert found["alike"], "capture changes the run"
    assert row.words in found["text"]
    assert case["failure"]["text"].endswith(found["text"])
    if row.stage:
        first = found["first"]
        expected = (row.stage, row.step, row.module, row.parameter)
        assert (first["stage"], first["step"], first["module"], first["parameter"]) == expected
    else:
        assert found["first"] is None
