"""The search for the settings that it takes to fail, over trials that are no trainings."""

import dataclasses
import shlex

import pytest

from shardproof.commands import check
from shardproof.harness.training import trials
from shardproof.harness.training.bisect import Axis, TrialOutcome, bisect
from shardproof.harness.training.request import NotCheckable, Request
from shardproof.runfile import CaseRecord, Failure, Own, Verdict

FAILS, PASSES = TrialOutcome("fail", "gradient", "S1", "off by 9 ulps"), TrialOutcome("pass")


def axes(names):
    return [Axis(name, "1" if name == "tp" else "off") for name in names.split()]


def search(names, fails, **options):
    """Search with a trial that fails where ``fails`` of the names that are on is true, or is an outcome."""
    tried = []

    def trial(plan):
        tried.append(frozenset(one.name for one in plan))
        outcome = fails(tried[-1])
        return outcome if isinstance(outcome, TrialOutcome) else FAILS if outcome else PASSES

    found = bisect(axes(names), trial, **options)
    assert len(set(tried)) == len(tried) == found.trials
    return found, [one.name for one in found.smallest], [[one.name for one in cure] for cure in found.cures]


NAMES = "compile recomputation clipping offload tp precision prefetch fused ties microbatches dp reshard"


def test_what_it_takes_together_is_cured_by_each():
    found, smallest, cures = search(NAMES, lambda on: {"tp", "precision"} <= on)
    assert smallest == ["tp", "precision"] and cures == [["tp"], ["precision"]]
    assert found.trials == 14 and found.is_complete


def test_of_two_that_suffice_one_is_left_and_the_pair_cures():
    found, smallest, cures = search(NAMES, lambda on: "tp" in on and ("ties" in on or "fused" in on))
    assert (smallest, cures) == (["tp", "fused"], [["tp"]])
    found, smallest, cures = search("compile fused ties", lambda on: "ties" in on or "fused" in on)
    assert (smallest, cures, found.is_complete) == (["fused"], [["fused", "ties"]], True)


def test_ddmin_finds_what_it_takes_of_many():
    """Either of two pairs suffices, so that no single axis cures and half of the axes do not tell."""
    either = [{"a", "h"}, {"b", "g"}]
    _, smallest, cures = search("a b c d e f g h", lambda on: any(pair <= on for pair in either), most=100)
    assert smallest in (["a", "h"], ["b", "g"])
    assert {frozenset(cure) for cure in cures} <= {frozenset(pair) for pair in ("ab", "ag", "hb", "hg")} and cures


def test_another_failure_is_no_cure_and_no_success():
    other = TrialOutcome("hang", "", "", "rank 1 waits")
    found, smallest, cures = search("dp tp compile", lambda on: other if "dp" not in on else "tp" in on)
    assert (smallest, cures) == (["dp", "tp"], [["tp"]])
    assert found.others == ("without dp: hang: rank 1 waits",)


@pytest.mark.parametrize("changed", [{"stage": "loss"}, {"signature": "S2"}, {"verdict": "crash"}])
def test_failures_are_alike_by_verdict_stage_and_signature(changed):
    other = TrialOutcome(**({"verdict": "fail", "stage": "gradient", "signature": "S1"} | changed))
    _, smallest, cures = search("dp tp", lambda on: True if "dp" in on else other)
    assert (smallest, cures) == (["dp"], [])


def test_trials_are_bounded_and_it_is_said():
    found, smallest, cures = search(NAMES, lambda on: {"tp", "precision"} <= on, most=8)
    assert (found.trials, found.is_complete, cures) == (8, False, [["tp"], ["precision"]])
    assert smallest == NAMES.split()
    assert "(8 trials, which did not suffice, 3 s)" in found.render("again", 3.0)


def test_what_passes_is_not_searched():
    found, _, _ = search(NAMES, lambda on: False)
    assert found.trials == 1
    assert found.render("", 0.0) == "bisect: it passes with all axes on (1 trial): there is nothing to search"


def test_report():
    found, _, _ = search("compile tp offload precision", lambda on: {"tp", "precision"} <= on)
    assert found.render("shardproof check --off compile,offload", 71.2).splitlines() == [
        "bisect: 4 axes are on",
        "  fails without compile, offload",
        "  cured by each alone: tp -> 1; precision -> off",
        "  smallest failing configuration: tp and precision on   (6 trials, 71 s)",
        "  command: shardproof check --off compile,offload",
    ]


# The axes of a check, and the commands that repeat it

ASKED = Request(
    model="my.py:model", mesh=(("dp", 2), ("tp", 1)), data_dims=("dp",), parallelize="tests.harness.test_bisect:shard",
    param_dtype="bfloat16", axes={"level": 2}, off=("clipping",), steps=9, step="my:step",
)  # fmt: skip


def shard(model, mesh, *, compiled=True, level: int = 1, style="fsdp", param_dtype=None):
    """Has axes."""


def test_axes_of_a_request():
    changes = trials.changes_of(ASKED, ["clipping", "foreach"], {"style": "ddp"})
    assert [str(axis) for axis in changes] == [
        "dp -> 1", "param_dtype -> float32", "microbatches -> 1", "foreach -> one parameter at a time",
        "--axis compiled -> False", "--axis level -> 0", "--axis style -> 'ddp'",
    ]  # fmt: skip
    changed = ASKED
    for change in changes.values():
        changed = change(changed)
    assert changed == dataclasses.replace(
        ASKED, mesh=(("dp", 1), ("tp", 1)), param_dtype="float32", microbatches=1, off=("clipping", "foreach"),
        axes={"level": 0, "compiled": False, "style": "ddp"},
    )  # fmt: skip
    with pytest.raises(NotCheckable, match=r"^check: --off-as stile=1: parallelize has no keyword-only argument of "):
        trials.changes_of(ASKED, [], {"stile": "1"})


def test_a_command_asks_for_what_was_asked():
    """Read by the command's own parser, but for what the command line does not say."""
    words = trials.words_of(ASKED)
    assert "--seed" not in words and words[-2:] == ["--off", "clipping"]
    assert check._request(check._parser().parse_args(words)) == ASKED


def test_options_that_are_refused(monkeypatch, capsys):
    words = ["--model", "gpt:0.1b", "--mesh", "2"]
    for given, line in {
        ("--off", "clip"): "argument --off: 'clip' is unknown; known are clipping, compile, foreach, mixed-precision, ",
        ("--off-as", "style"): "argument --off-as: 'style' is not NAME=VALUE",
    }.items():
        with pytest.raises(SystemExit):
            check.check([*words, *given])
        assert line in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert check.check([*words, "--bisect"]) == 2
    line = "shardproof check: --bisect starts checks of its own: start it without torchrun\n"
    assert capsys.readouterr().err == line


def record(verdict, **changes):
    failure = Failure(stage="gradient", step=1, text="off by 9 ulps\nmore", rank=0) if verdict == "fail" else None
    own = Own(model="m", mesh={}, data=(), compared=1, signature="S1", axes=("foreach",))
    return CaseRecord(
        id="own", implementation="own", requirement="", world=2, device="cpu", parameters={}, seconds=30.0,
        verdict=Verdict(verdict), failure=failure, own=own,
    )  # fmt: skip


def test_a_search_repeats_the_steps_that_it_takes(monkeypatch, capsys):
    tried = []

    def run(words, check_):
        tried.append(words)
        asked = check._request(check._parser().parse_args(words))
        return trials.outcome_of(record("fail" if asked.size == 2 else "pass"))

    monkeypatch.setattr(trials, "run", run)
    asked = dataclasses.replace(ASKED, axes={"compiled": False, "level": 0})
    text = trials.search(asked, record("fail"), device="cpu", given={}, check=check.check)
    assert text.splitlines()[:3] == [
        "bisect: 4 axes are on", "  fails without param_dtype, microbatches, foreach", "  cured by each alone: dp -> 1"
    ]  # fmt: skip
    command = text.splitlines()[-1].removeprefix("  command: python -m shardproof check ")
    repeated = check._request(check._parser().parse_args(shlex.split(command)))
    changes = {"steps": 2, "param_dtype": "float32", "microbatches": 1, "off": ("clipping", "foreach")}
    assert repeated == dataclasses.replace(asked, **changes)
    assert len(tried) == 5 and all(words[-4:] == ["--device", "cpu", "--deadline", "150"] for words in tried)
    assert capsys.readouterr().err.splitlines()[0] == "bisect: trial 2 without dp: pass"
