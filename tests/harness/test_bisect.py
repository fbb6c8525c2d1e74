"""The search for the settings that it takes to fail, over trials that are no trainings."""

import pytest

from shardproof.harness.training.bisect import Axis, Outcome, bisect

FAILS, PASSES = Outcome("fail", "gradient", "S1", "off by 9 ulps"), Outcome("pass")


def axes(names):
    return [Axis(name, "1" if name == "tp" else "off") for name in names.split()]


def search(names, fails, **options):
    """Search with a trial that fails where ``fails`` of the names that are on is true, or is an outcome."""
    tried = []

    def trial(plan):
        tried.append(frozenset(one.name for one in plan))
        outcome = fails(tried[-1])
        return outcome if isinstance(outcome, Outcome) else FAILS if outcome else PASSES

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
    other = Outcome("hang", "", "", "rank 1 waits")
    found, smallest, cures = search("dp tp compile", lambda on: other if "dp" not in on else "tp" in on)
    assert (smallest, cures) == (["dp", "tp"], [["tp"]])
    assert found.others == ("without dp: hang: rank 1 waits",)


@pytest.mark.parametrize("changed", [{"stage": "loss"}, {"signature": "S2"}, {"verdict": "crash"}])
def test_failures_are_alike_by_verdict_stage_and_signature(changed):
    other = Outcome(**({"verdict": "fail", "stage": "gradient", "signature": "S1"} | changed))
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
        "bisect: 4 axes are on; fails without compile, offload; cured by each alone: tp -> 1; precision -> off",
        "  smallest plan that fails has tp and precision on   (6 trials, 71 s)",
        "  command: shardproof check --off compile,offload",
    ]
