"""`--explain`: where it says that a bug shows first, what it leaves as it is, and that no other run captures."""

import dataclasses
from typing import NamedTuple

import pytest

from shardproof.harness.judging.explanation import DivergentTensor
from shardproof.harness.judging.finding import Location, Stage
from tests.harness import explained_cases
from tests.harness.inner import PYTHONPATH, run_cases

pytestmark = pytest.mark.sampled

PLANTED, OWN = "planted.adapters:", "tests.harness.explained_bugs:"


def last(name):
    """The name of an adapter without its module."""
    return name.rpartition(":")[2]


class Row(NamedTuple):
    """A bug, as of ``--impl``, the case that it fails, and where `--explain` says that it shows first."""

    bug: str
    case: str
    stage: str
    step: int
    module: str
    parameter: str
    words: str = ""


OTHER_UNITS = "layers.1 (of other units: (root), layers.0, layers.2)"
DIVISION = "it is 2 times the oracle's everywhere, as when the division by the 2 ranks is missing"
ROWS = [
    Row(PLANTED + "forgotten_division", "test_tower-w2", "gradient", 0, "out", "bias", DIVISION),
    Row(PLANTED + "dropped_reduction", "test_tower-w2", "gradient", 0, "layers.1.out_proj", "bias",
        f"- backward reduce_scatter {OTHER_UNITS}"),
    Row(PLANTED + "lonely_replicas", "test_replicas-w4", "gradient", 0, "layers.1.out_proj", "bias"),
    Row(OWN + "StaleParameters", "test_tower-w2", "gathered parameter", 1, "layers.1.in_proj", "weight",
        f"- forward all_gather {OTHER_UNITS}"),
    Row(PLANTED + "local_norm", "test_clipped-w2", "total norm", 0, "", "", "it equals the norm of what this rank"),
    Row(OWN + "SkippedUpdate", "test_tied-w2", "parameter after step", 0, "layers.1.first", "weight",
        "it was updated by: sharded 0, baseline "),
    Row(OWN + "UnsyncedBuffer", "test_buffers-w2", "buffer", 0, "layers.1", "offset"),
    Row(OWN + "LostCasts", "test_casts-w2", "gathered parameter", 0, "(root)", "gain",
        "has dtype torch.float32; the baseline has torch.bfloat16"),
    Row(PLANTED + "replaced_gradient", "test_accumulated-w2", "gradient", 0, "out", "bias"),
    Row(OWN + "SwappedState", "test_tower-w2", "optimizer state", 0, "layers.0.out_proj", "bias",
        "'layers.2.out_proj.bias: momentum_buffer'"),
    Row(OWN + "WrongModule", "test_tower-w2", "output of a module", 0, "layers.1.in_proj", ""),
    Row(OWN + "ScaledAtTheBorder", "test_tower-w2", "gradient of a module's output", 0, "layers.1", ""),
    Row(PLANTED + "second_gather", "test_counted-w2", "", 0, "", "", "+ forward all_gather float32"),
]  # fmt: skip


def explained(names, expression, folder, *options, passes=False, path=PYTHONPATH):
    """Run the cases with `--explain`; the records, and what pytest printed."""
    chosen = (explained_cases.__file__, "-k", expression, *options)
    found, done = run_cases(folder, names, *chosen, code=0 if passes else 1, PYTHONPATH=path)
    return found, done.stdout


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory):
    """The records of one run of the cases of all selected bugs."""
    rows = [item.callspec.params["row"] for item in request.session.items if item.name.startswith("test_named[")]
    # With the colon, since one name may end another.
    chosen = [f":{last(row.bug)}-{size} and {case}" for row in rows for case, _, size in [row.case.partition("-")]]
    names = dict.fromkeys(row.bug for row in rows)
    return explained(names, " or ".join(chosen), tmp_path_factory.mktemp("explained"), "--explain")[0]


NIGHTLY = pytest.mark.nightly
_BY_DAY = ("StaleParameters", "SkippedUpdate", "dropped_reduction")


NAMED = [pytest.param(one, id=last(one.bug), marks=() if last(one.bug) in _BY_DAY else NIGHTLY) for one in ROWS]


@pytest.mark.parametrize("row", NAMED)
def test_named(cases, row):
    (case,) = [case for case in cases if case["implementation"] == row.bug]
    found = case["explanation"]
    assert case["verdict"] == found["again"] == "fail"
    assert found["alike"], "capture changes the run"
    assert row.words in found["text"]
    assert case["failure"]["text"].endswith(found["text"])
    if row.stage:
        first = found["first"]
        parameter = f"{row.module}.{row.parameter}".removeprefix("(root).") if row.parameter else ""
        expected = (row.stage, row.step, row.module, parameter)
        assert (first["stage"], first["step"], first["module"], first["parameter"]) == expected
    else:
        assert found["first"] is None


#: A plugin with which passing cases run once more as well.
EVERY_CASE = """
from shardproof.runfile import Verdict
from shardproof.harness.plugin import explaining
explaining._EXPLAINED = (*explaining._EXPLAINED, Verdict.PASS)
"""

SOUND = ["reference", "reference.flat", "torch.fully_shard", "torch.fsdp"]


@pytest.fixture
def every(tmp_path):
    """Run the sound implementations' cases twice, and return the records."""
    (tmp_path / "every_case.py").write_text(EVERY_CASE)

    def every(names, expression):
        path = f"{tmp_path}:{PYTHONPATH}"
        cases, _ = explained(names, expression, tmp_path, "-p", "every_case", "--explain", passes=True, path=path)
        return [case for case in cases if case["verdict"] != "unsupported"]

    return every


def assert_unchanged(cases):
    """Check that a run with capture on has the same bits, sees the model's modules, and finds no divergence."""
    for case in cases:
        found, who = case["explanation"], f"{case['implementation']} {case['id']}"
        assert found["again"] == "pass", f"{who}: {found['text']}"
        assert found["alike"], f"{who}: losses or distances differ"
        assert found["first"] is None, f"{who}: {found['text']}"
        assert found["compared"] > 20, who


def test_capture_changes_nothing(every):
    cases = every(["reference", "torch.fsdp"], "test_tower and w2 or test_recomputed")
    assert_unchanged(cases)
    assert len(cases) == 4


@pytest.mark.nightly
def test_capture_changes_nothing_anywhere(every):
    cases = every(SOUND, "test_")
    assert_unchanged(cases)
    assert {case["implementation"] for case in cases} == set(SOUND)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The records of failures without a divergence of a second run, and what pytest printed."""
    bugs = [OWN + "Unsteady", OWN + "Raising"]
    return explained(bugs, "test_tower and w2", tmp_path_factory.mktemp("explained"), "--explain")


def record_of(cases, bug):
    (case,) = [case for case in cases if case["implementation"].endswith(f":{bug}")]
    return case


def test_a_failure_that_does_not_come_again(failures):
    case = record_of(failures[0], "Unsteady")
    assert case["verdict"] == "fail", "the first run decides"
    assert (case["explanation"]["again"], case["explanation"]["alike"]) == ("pass", False)
    told = "explained: run again with capture on: it passed, so the failure is not steady (flaky)\n"
    assert f"\n{told}collectives: every rank issued the same on each group (" in case["failure"]["text"]


def test_an_error_says_how_far_the_step_came(failures):
    case = record_of(failures[0], "Raising")
    found = case["explanation"]
    assert found["alike"]
    assert found["stopped"] == "output of a module of '(root)'"
    assert "a step stopped after the output of a module of '(root)'" in case["failure"]["text"]


def test_a_failure_ends_with_the_line_that_repeats_it(failures):
    cases, printed = failures
    for case in cases:
        last = case["failure"]["text"].splitlines()[-1]
        assert f"\n{last}\nreproduce: {case['reproduce']}\n" in printed
        assert "--explain" not in case["reproduce"]


@pytest.mark.nightly
def test_workers_explain_too_and_nobody_unasked(tmp_path):
    names = [PLANTED + "forgotten_division", PLANTED + "dropped_reduction"]
    alone, _ = explained(names, "test_tower and w2", tmp_path, "--explain")
    workers, _ = explained(names, "test_tower and w2", tmp_path, "--explain", "-n", "2")
    firsts = [{case["implementation"]: case["explanation"]["first"] for case in cases} for cases in (alone, workers)]
    assert firsts[0] == firsts[1]
    assert all(firsts[0].values())
    ordinary, _ = explained(names, "test_tower and w2", tmp_path)
    assert not any("explanation" in case for case in ordinary)


def test_what_a_check_tells_all_ranks_is_said_of_one():
    one = DivergentTensor(order=(0,), title="others", location=Location(stage=Stage.OUTPUT, step=0, rank=0, name="a"),
                    module="a", parameter="", where="", text="text")  # fmt: skip
    other = dataclasses.replace(one, location=dataclasses.replace(one.location, rank=1))
    assert not any("rank 1 too" in line or "no other rank" in line for line in one.render([one], size=2))
    assert "  the same tensor diverges on rank 1 too" in one.render([other], size=2)
