"""Adapters that show too little, or claim to shard what they hold in full, fail with a sentence that says so."""

from __future__ import annotations

import pytest

from tests.harness import planted, planted_evidence

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which each planted bug has ranks of its own")

CASES = "w2 and (test_first_step_of_adam and for-loop-adamw or test_single_unit and 16x15 or test_rank_holds_its_share)"
ADAM, TWO_STEPS, SHARE = "test_first_step_of_adam", "test_single_unit", "test_rank_holds_its_share"
BIAS = "'layers.0.in_proj.bias'"
ALL = "every rank holds all of"


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    bugs = [*planted_evidence.PIECES, *planted_evidence.CLAIMS]
    return planted.failures_of(bugs, CASES, tmp_path_factory.mktemp("evidence"))


def test_the_sound_reference_passes_the_same_cases(failures):
    assert failures["reference"] == {ADAM: None, TWO_STEPS: None, SHARE: None}


@pytest.mark.parametrize(
    ("bug", "case", "says"),
    [
        ("Nothing", ADAM, f"the shards of {BIAS} do not cover it: element [0] is on no rank of replica 0 (ranks 0, 1); "
         "34 of 34 elements are missing"),
        ("NothingAndNoStep", ADAM, f"the shards of {BIAS} do not cover it: element [0] is on no rank"),
        ("NothingOnRankOne", ADAM, f"the shards of {BIAS} do not cover it: element [17] is on no rank of replica 0 "
         "(ranks 0, 1); 17 of 34 elements are missing"),
        ("AllOnRankZero", ADAM, "holds 5712 of 5712 elements of parameters that the ranks divide; its share is 2952"),
        ("ZerosCutFromZeros", ADAM, "its cut selects element [0] more than once"),
        ("CutIsTheTensor", ADAM, "its cut selects element [0] more than once"),
        ("CutOfFloatsIsTheTensor", ADAM, "its cut of torch.float32 positions does not select the elements that"),
        ("RankZerosPieces", ADAM, f"the shards of {BIAS} do not cover it: element [17] is on no rank of replica 0"),
        ("FirstRowEverywhere", ADAM, f"the shards of {BIAS} overlap: element [0] is on ranks 0, 1 of replica 0"),
        ("NoGradients", ADAM, f"the shards of the gradient of {BIAS} do not cover it: element [0] is on no rank"),
        ("LessFromTheSecondStep", TWO_STEPS, "the shard has shape (0,), and had (8,) in an earlier step"),
        ("PlainDdp", ADAM, f"the implementation claims to shard parameters, and {ALL} them (5712 elements)"),
        ("HoldsEverythingFromTheStart", ADAM, f"the implementation claims to shard parameters, and {ALL} them"),
        ("HoldsEverythingFromTheStart", SHARE, f"the implementation claims to shard parameters, and {ALL} them"),
        ("PaddedByAPage", SHARE, f"the implementation claims to shard parameters, and {ALL} them"),
        ("HiddenCopy", SHARE, "holds 324480 bytes of parameters after sharding; its share is 163680"),
        ("ClaimsOptimizerState", ADAM, f"the implementation claims to shard optimizer state, and {ALL} it"),
        ("ClaimsGradients", ADAM, f"the implementation claims to shard gradients, and {ALL} them"),
    ],
)  # fmt: skip
def test_too_little_is_found_out(failures, bug, case, says):
    failure = failures[bug][case]
    assert failure is not None, "it passes"
    assert says in failure["text"]


def test_no_bug_is_left_without_a_sentence(failures):
    sound = [bug for bug, found in failures.items() if not any(found.values())]
    assert sound == ["reference"]


def test_element_and_parameter_are_in_the_record(failures):
    failure = failures["NothingOnRankOne"][ADAM]
    assert (failure["stage"], failure["name"], failure["element"]) == ("sharding", BIAS.strip("'"), [17])
