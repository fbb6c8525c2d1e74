"""Bugs in the areas of five chapters are caught, each by the cases that name the requirement that it breaks."""

from __future__ import annotations

import pytest

from tests.harness import planted_composition as planted
from tests.harness.planted import few_by_day, name_of, run_suites, selected

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

#: One item of each test, by the words of its id.
COMPUTES = "test_recomputed_units[w2-None-call"
TWICE = "test_recomputed_unit_runs_twice[w2-None-call"
GATHERS = "test_one_gather_serves_both[w2-None-None-reentrant-call"
TIED = "test_tied_inside_of_units[w2-of-two-modules-None"
FEWER = "test_a_rank_runs_fewer_units[w2-at-the-end-original"
LATER = "test_a_later_iteration_differs[w2-1-original-None"
EARLY = "test_later_iterations_run_other_units[w2-ends-early-original"
EVALUATION = "test_evaluation_is_not_compared[w2-original-None"
HALVES = "test_two_halves_of_a_mesh[w4-2x2x1-3"
REPLICAS = "test_replicas_of_tensor_parallel_shards[w4-2x2x1-3-False"
LAYOUT = "test_layout_of_two_dimensions[w4-16"
COUNTS = "test_collectives_of_both_dimensions[w4"
STATES = "test_states_of_the_first_rank_everywhere[w4-True"
RESUMES = "test_one_dimension_and_replicas[w4-shards-new-run"
ONTO = "test_onto_another_mesh[w4-shards-tensor"

#: The second name of a shared parameter has become a parameter of its own.
TWO_PARAMETERS = "shown beside the first name of the same parameter: ['layers.0.second.weight'"

CAUGHT = {
    planted.NothingRecomputed: (COMPUTES, "layers.0 1 and 0, layers.1 1 and 0, layers.2 1 and 0"),
    planted.ReshardsInRecomputation: (GATHERS, "all_gather instead of 3 in backward"),
    planted.FlatReshardsInRecomputation: (GATHERS, "all_gather instead of 3 in backward"),
    planted.RecomputesWithoutGather: (TWICE, "got mixed torch.Tensor and DTensor"),
    planted.TiedInOnePlace: (TIED, TWO_PARAMETERS),
    planted.TiedUnknownElsewhere: (TIED, TWO_PARAMETERS),
    planted.FlatTiedInOnePlace: (TIED, "mat2 must be a matrix, got 1-D tensor"),
    planted.FlatTiedShardInOnePlace: (TIED, "Changing shared parameters is not supported yet: first.weight"),
    planted.EndIsNotCompared: (FEWER, "AssertionError: raised: 'Detected mismatch between collectives"),
    planted.EarlyEndGivesNoWarning: (EARLY, "rank 0 should have been warned"),
    planted.WrongCategory: (LATER, "DeprecationWarning: Forward order differs"),
    planted.ShortSentence: (LATER, "does not begin with"),
    planted.PositionGoesOn: (LATER, "warned although the order is that of the first iteration"),
    planted.WarnsInEvaluation: (EVALUATION, "warned although the order is that of the first iteration"),
    planted.Thawed: (LATER, "requires_grad after backward, where only second is frozen: {'second.0.weight': True"),
    planted.FlatNeverFreezes: (
        EVALUATION,
        "requires_grad after backward, where only second is frozen: {'second.0.weight': True",
    ),
    planted.PlainShard: (LAYOUT, "layers.0.in_proj.weight is placed (Shard(dim=0), Shard(dim=0)) instead of"),
    planted.TensorParallelFirst: (LAYOUT, "layers.0.in_proj.weight is on DeviceMesh((tp=2, dp=2)"),
    planted.PendingSum: (COUNTS, "norm.weight"),
    planted.StrayWorld: (COUNTS, "collectives on groups other than"),
    planted.PipelineAverage: (HALVES, "diverges from the baseline: gradient of"),
    planted.ShardsOverReplicas: (REPLICAS, "diverges from the baseline: gradient of"),
    planted.FirstRankOfShards: (STATES, "not those of the first rank"),
    planted.LastRanksValues: (STATES, "not those of the first rank"),
    planted.FloatingBuffersOnly: (STATES, "1.num_batches_tracked"),
    planted.OwnLearningRate: (RESUMES, "after loading instead of"),
    planted.OneNameOfTied: (RESUMES, "the model's names and shapes are"),
    planted.RowsMisplaced: (ONTO, "not as saved"),
    planted.ForgottenMoments: (RESUMES, "two runs that should be equal differ: parameter after step"),
    planted.StateOfTheOldPlace: (RESUMES, "two runs that should be equal differ: parameter after step"),
}


def words(item: str) -> str:
    """The expression of pytest's ``-k`` that finds an item of any implementation."""
    test, _, parameters = item.partition("[")
    return f"{test} and -{parameters}"


@pytest.fixture(scope="module")
def items(request):
    """The item of each selected bug."""
    return {bug: CAUGHT[bug][0] for bug in selected(request)}


@pytest.fixture(scope="module")
def failures(items, tmp_path_factory):
    """The failure of each item, or None: ``{implementation: {item: failure}}``, of a bug its own item alone."""
    names = ["reference", "reference.flat", *map(name_of, items)]
    chosen = [f"({bug.__name__} and {words(item)})" for bug, item in items.items()]
    chosen += [f"(not planted_composition and {words(item)})" for item in sorted(set(items.values()))]
    found = {}
    for case in run_suites(names, " or ".join(chosen), tmp_path_factory.mktemp("planted"), timeout=500):
        of_one = found.setdefault(case["implementation"].rpartition(":")[2], {})
        of_one[case["id"].partition("::")[2].removesuffix("]")] = case["failure"]
    return found


@pytest.mark.parametrize("sound", ["reference", "reference.flat"])
def test_the_sound_implementations_pass_the_same_cases(failures, items, sound):
    assert {item for item, failure in failures[sound].items() if failure} == set()
    assert len(failures[sound]) == len(set(items.values()))


@pytest.mark.parametrize("bug", few_by_day(CAUGHT, [bug.name for bug in CAUGHT]))
def test_bug_is_caught(failures, bug):
    item, says = CAUGHT[bug]
    (failure,) = failures[bug.__name__].values()
    assert failure is not None, f"{item}] passes"
    assert says in failure["text"], failure["text"]
