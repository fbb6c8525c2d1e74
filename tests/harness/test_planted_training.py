"""Bugs of hooks, containers, units, prefetching and freezing are caught, each by the case that names what it breaks."""

from __future__ import annotations

import pytest

from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness import planted
from tests.harness import planted_training as bugs

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

#: A case and the rest of its id: one item of each case is enough.
SEVERAL = "test_unit_of_several_modules_is_gathered_once", "None]"
SKIPPED_MEMBER = "test_member_that_does_not_run", "w2"
METHOD = "test_other_forward_methods_free", "None]"
ALONE = "test_unit_called_directly", "undelayed"
AHEAD = "test_more_is_gathered_before_a_layer_computes", "w2"
ORDER = "test_order", "w2"
ANY_OUTPUT = "test_loss_of_any_one_output", "2-nested"
IN_PLACE = "test_output_changed_in_place", "w2"
KEYWORDS = "test_inputs_by_keyword", "not order"
KEYWORDS_ORDER = "test_inputs_by_keyword_are_reduced_in_order", "w2"
INPUT = "test_gradient_of_the_input", "None]"
KEPT_OUTPUT = "test_loss_of_the_last_output", "False-of-a-unit"
LAST_OUTPUT = "test_loss_of_the_last_output", "None-of-a-unit"
HOOK = "test_post_accumulate_hook_runs_once", "w2"
NESTED = "test_nested_units_are_gathered_apart", "None]"
ONCE = "test_evaluation_gathers_each_unit_once", "no_grad"
INFERENCE = "test_first_forward_is_in_inference_mode", "w2-shards"
FROZEN = "test_frozen_before_sharding", "middle-None"
BETWEEN = "test_frozen_between_steps", "None]"
REDUCED = "test_frozen_units_are_not_reduced", "middle"
FREED = "test_frozen_units_are_freed_in_backward", "middle"
COMPILED = "test_compiled_units", "aot_eager-None-None"

FIRST = "in the first step (step 0)"
#: Of torch: a unit's backward ran before its parameters were gathered again.
NOT_GATHERED = "are out of bounds for storage of size 0"
ROWS = [
    (bugs.SplitUnits, SEVERAL, "forward gathers ['(root)', '', '', 'layers.2']"),
    (bugs.PrefetchIgnored, AHEAD, "layers.0 computes in forward after 2 collectives with prefetching and 2 without"),
    (bugs.MethodNeverFrees, METHOD, "encoder: gathered is True once its registered method has returned"),
    (bugs.MethodNotHooked, METHOD, "when the input's gradient is known, the number of reduced units is 1 of 2"),
    (
        bugs.FirstMemberCompletes,
        SEVERAL,
        "forward gathers ['(root)', 'layers.0,layers.1', 'layers.0,layers.1', 'layers.2']",
    ),
    (bugs.FirstOutputOnly, ANY_OUTPUT, NOT_GATHERED),
    (bugs.FlatFirstOutputOnly, ANY_OUTPUT, NOT_GATHERED),
    (bugs.NoGradNotResharded, ONCE, "uses what the evaluation gathered of layers.0, layers.1, layers.2"),
    (bugs.FlatNoGradNotResharded, ONCE, "uses what the evaluation gathered of layers.0, layers.1, layers.2"),
    (bugs.FrozenThawed, FROZEN, "before the first step (step 0) requires_grad is True of layers.1.in_proj.bias"),
    (bugs.GraphBreaks, COMPILED, " graphs, and 1 unsharded: sharding breaks graphs"),
    (bugs.ViewsForgotten, IN_PLACE, NOT_GATHERED),
    (bugs.KeywordsNotHooked, KEYWORDS_ORDER, "before layers.0 has all its gradients, reduced are []"),
    (bugs.GradientsReversed, KEYWORDS, f"gradient of 'layers.0.back.bias' {FIRST}"),
    (bugs.InputsDetached, INPUT, "the input has no gradient"),
    (bugs.NestedContainersSkipped, ANY_OUTPUT, NOT_GATHERED),
    (bugs.MemberNeverCompletes, SKIPPED_MEMBER, "collectives in backward of 'used,skipped' in the first step"),
    (bugs.InnerUnitsApart, NESTED, "none of blocks.0.attention.projection, blocks.1.attention.projection"),
    (bugs.OnlyRootEndsBackward, ALONE, "gradient of 'layers.0.in_proj.bias' in the second step (step 1)"),
    (
        bugs.UnreachedKept,
        KEPT_OUTPUT,
        "after backward every parameter is sharded, but gathered are head0.weight, head0.bias",
    ),
    (bugs.MissedPrefetchKept, LAST_OUTPUT, "output of 'microbatch 0, tensor 0' in the third step (step 2)"),
    (bugs.MadeInInferenceMode, INFERENCE, "Setting requires_grad=True on inference tensor"),
    (bugs.BackwardPrefetchIgnored, AHEAD, "layers.2 computes in backward after"),
    (
        bugs.OneAheadOnly,
        ORDER,
        "layers.0 computes in the evaluation before the first step (step 0) before these are gathered: layers.2",
    ),
    (bugs.PrefetchReversed, ORDER, "Mismatch between actual and expect strings"),
    (bugs.FrozenOnce, BETWEEN, "gradient of 'layers.0.in_proj.weight' in the second step (step 1)"),
    (bugs.FlatFrozenOnce, BETWEEN, f"gradient of 'layers.1.in_proj.bias' {FIRST}"),
    (bugs.FrozenReduced, REDUCED, "'layers.1.in_proj.bias'"),
    (bugs.FrozenNeverFreed, FREED, "layers.1 is still gathered when the backward of layers.0 begins"),
    (bugs.FlatFrozenKept, FREED, "layers.1 is still gathered when the backward of layers.0 begins"),
    (bugs.HooksRunTwice, HOOK, "ran twice in one backward"),
]


CHAPTERS = ["training", "autograd", "prefetch", "init", "evaluation", "frozen", "compiled"]


def _expression(rows: list[tuple[type, tuple[str, str], str]]) -> str:
    """For pytest's ``-k``: each bug with its own cases, and each sound half with the cases of its bugs."""
    # A sound half runs one item of each case, although two bugs may need two.
    sound = {(_sound(bug), case): rest for bug, (case, rest), _ in rows}
    planted_ones = {(f":{bug.__name__}", case): rest for bug, (case, rest), _ in rows}
    chosen = (sound | planted_ones).items()
    # With the bracket, since one name may begin another.
    return " or ".join(f"({case}[ and {who}-w2 and {rest})" for (who, case), rest in chosen)


def _sound(bug: type) -> str:
    return ":ReferenceFlatAdapter" if issubclass(bug, ReferenceFlatAdapter) else "[reference"


@pytest.fixture(scope="module")
def rows(request):
    """Those whose bugs are selected."""
    bugs_that_run = planted.selected(request)
    return [row for row in ROWS if row[0] in bugs_that_run]


@pytest.fixture(scope="module")
def failures(rows, tmp_path_factory):
    adapters = [*dict.fromkeys(bug for bug, _, _ in rows), ReferenceFlatAdapter]
    return planted.failures_of(adapters, _expression(rows), tmp_path_factory.mktemp("training"), CHAPTERS)


@pytest.mark.parametrize("sound", ["[reference", ":ReferenceFlatAdapter"])
def test_both_halves_pass_the_same_cases(failures, rows, sound):
    cases = {case for bug, (case, _), _ in rows if _sound(bug) == sound}
    # By day there may be no bug of one half.
    assert failures.get(sound[1:], {}) == dict.fromkeys(cases)


@pytest.mark.parametrize(
    ("bug", "case", "words"), planted.few_by_day(ROWS, [f"{bug.name}-{case[0]}" for bug, case, _ in ROWS])
)
def test_caught(failures, bug, case, words):
    failure = failures[bug.__name__][case[0]]
    assert failure is not None, "it passes"
    assert words in failure["text"]
