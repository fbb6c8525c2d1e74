"""Comparisons: the first stage that diverges, the element, and the guess at the cause."""

import copy
import functools

import pytest
import torch
from torch import nn

from shardproof.harness.adapters.base import Clip, Traits
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.replicas import DdpAdapter
from shardproof.harness.collectives.units import ROOT, UnitLookup, units_of
from shardproof.harness.judging import numerics
from shardproof.harness.judging.elements import exact_difference
from shardproof.harness.judging.finding import Divergence, Finding, Location, Stage
from shardproof.harness.judging.signatures import guess_from_values, guess_gradient, guess_norm
from shardproof.harness.models import optim
from shardproof.harness.parity.comparison import Context, StepComparison
from shardproof.harness.parity.oracle import Oracle
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import StepPicture
from shardproof.harness.tensors.pieces import Piece, whole
from shardproof.testing import models, world
from tests.errors import error_of


@pytest.fixture
def step():
    """Pictures of one step on two ranks that agree, as rank 1 sees them: (sharded, baseline, oracle)."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    oracle = Oracle(model, optimizer=optim.sgd(), clip=Clip(0.01))
    batches = [[(torch.randn(4, 3),)] for _ in range(2)]
    computed = oracle.step(batches, loss=models.mean_square)

    def picture():
        def pieces(tensors):
            return {name: whole(tensor.float().clone()) for name, tensor in tensors.items()}

        return StepPicture(
            outputs=[[computed.outputs[1][0].float()]], losses=[computed.losses[1][0].float()],
            gradients=pieces(computed.gradients), norm=computed.norm.float(), clipped=pieces(computed.clipped),
            parameters=pieces(computed.parameters),
            state={name: pieces(state) for name, state in computed.state.items()},
        )  # fmt: skip

    return picture(), picture(), computed


def compare(step, **options):
    return StepComparison(*step, Context(step=7, rank=1, member=1, size=2, **options)).first_finding()


def test_every_rank_measures_with_the_ulp_of_the_full_tensor(step):
    """This rank's shard has small elements alone: measured in their own ulps, its error would look larger."""
    sharded, baseline, oracle = step
    full = torch.tensor([[1.0, 1.0, 1.0], [0.001, 0.001, 0.001]], dtype=torch.float64)
    oracle.gradients["weight"] = full
    baseline.gradients["weight"] = whole(full.float())
    error = torch.finfo(torch.float32).eps
    sharded.gradients["weight"] = Piece(full[1:].float() + error, lambda tensor: tensor[1:])
    comparison = StepComparison(*step, Context(step=7, rank=1, member=1, size=2))
    comparison.first_finding()
    measured = {item.name: item.sharded_ulps for item in comparison.measured if item.stage == Stage.GRADIENT}
    assert measured["weight"] == pytest.approx(1, rel=0.01)


def test_equal_pictures_do_not_diverge(step):
    comparison = StepComparison(*step, Context(step=7, rank=1, member=1, size=2))
    assert comparison.first_finding() is None
    stages = [item.stage for item in comparison.measured]
    assert stages == [one for one in STAGES for _ in range(1 if one in ONCE else 2)]


def spoil(step, stage):
    sharded = step[0]
    tensor = {
        Stage.OUTPUT: sharded.outputs[0][0],
        Stage.LOSS: sharded.losses[0],
        Stage.GRADIENT: sharded.gradients["weight"].tensor,
        Stage.TOTAL_NORM: sharded.norm,
        Stage.CLIPPED_GRADIENT: sharded.clipped["weight"].tensor,
        Stage.PARAMETER: sharded.parameters["weight"].tensor,
        Stage.OPTIMIZER_STATE: sharded.state["weight"]["momentum_buffer"].tensor,
    }[stage]
    tensor[(1, 1)[: tensor.ndim]] += 1.0


#: Not for each parameter.
ONCE = (Stage.OUTPUT, Stage.LOSS, Stage.TOTAL_NORM)
STAGES = [
    Stage.OUTPUT, Stage.LOSS, Stage.GRADIENT, Stage.TOTAL_NORM, Stage.CLIPPED_GRADIENT, Stage.PARAMETER,
    Stage.OPTIMIZER_STATE,
]  # fmt: skip


def test_stages_order_themselves():
    assert sorted(STAGES, reverse=True) == STAGES[::-1]
    assert Stage.SHARDING < Stage.OUTPUT <= Stage.OUTPUT < Stage.COLLECTIVES


@pytest.mark.parametrize("first", range(len(STAGES)), ids=[stage.value for stage in STAGES])
def test_the_first_stage_that_diverges_is_named_and_its_element(step, first):
    for stage in STAGES[first:]:
        spoil(step, stage)
    location = compare(step).location
    assert (location.stage, location.step, location.rank) == (STAGES[first], 7, 1)
    assert location.element == (() if location.stage in (Stage.LOSS, Stage.TOTAL_NORM) else (1, 1))


def test_missing_and_unexpected_gradients(step):
    sharded, baseline, oracle = step
    sharded.gradients["weight"] = None
    assert compare(step).text == "the sharded run has no gradient; the baseline has one"
    baseline.gradients["weight"] = None
    assert compare(step).text == "the sharded run and the baseline have no gradient; the oracle has one"
    sharded.gradients["weight"] = whole(torch.zeros(2, 3))
    assert compare(step).text == "the baseline has no gradient; the sharded run and the oracle have one"
    oracle.gradients["weight"] = None
    assert compare(step).text == "the sharded run has a gradient, but no rank used the parameter"
    assert compare(step, unused_is_zero=True) is None
    sharded.gradients["weight"] = baseline.gradients["weight"] = whole(torch.ones(2, 3))
    told = "no rank used the parameter (the baseline has one too, the oracle has none)"
    assert compare(step, unused_is_zero=True).text == f"the sharded run has a gradient, but {told}"


def test_wrong_shape_dtype_and_names(step):
    gradients = step[0].gradients
    gradients["weight"] = whole(torch.zeros(2, 2))
    assert "the local shard has shape (2, 2); this rank's share of (2, 3) is (2, 3)" in compare(step).text
    gradients["weight"] = whole(step[2].gradients["weight"].bfloat16())
    assert "has dtype torch.bfloat16; the baseline has torch.float32" in compare(step).text
    gradients["wait"] = gradients.pop("weight")
    assert compare(step).text == "parameters missing: ['weight']; unknown: ['wait']"


def test_element_is_told_in_the_full_tensor(step):
    """The piece holds the last column only; its element 1 is row 1 of column 2."""
    piece = Piece(step[2].gradients["weight"].float()[:, 2:].clone(), lambda full: full[:, 2:])
    piece.tensor[1, 0] += 1.0
    step[0].gradients["weight"] = piece
    assert compare(step).location.element == (1, 2)


def test_baseline_that_is_off_judges_nothing(step):
    for picture in step[:2]:
        picture.gradients["weight"].tensor.mul_(1 + 2 * numerics.BASELINE_LIMIT_ULPS * 2.0**-23)
    with pytest.raises(RuntimeError, match=r"the baseline itself is .* ulps from the oracle"):
        compare(step)


@pytest.mark.parametrize(
    "value, word", [(float("nan"), "NaN"), (float("inf"), "infinite"), (-float("inf"), "infinite")]
)
@pytest.mark.parametrize("stage", ["loss", "norm", "gradient", "parameter"])
def test_what_is_not_finite_is_told_for_each_run(step, stage, value, word):
    def break_one(picture, loss):
        found = {
            "loss": loss, "norm": picture.norm, "gradient": picture.gradients["weight"],
            "parameter": picture.parameters["weight"],
        }[stage]  # fmt: skip
        getattr(found, "tensor", found).reshape(-1)[-1:] = value

    sharded, baseline, oracle = step
    break_one(sharded, sharded.losses[-1])
    finding = compare(step)
    element = (1, 2) if stage in ("gradient", "parameter") else ()
    assert finding.location.element == element
    assert finding.text == f"is {word} in the sharded run, finite in the baseline and the oracle"
    break_one(baseline, baseline.losses[-1])
    assert compare(step).text == f"is {word} in the sharded run and the baseline, finite in the oracle"
    break_one(oracle, oracle.losses[1][0])
    assert compare(step).text.startswith(f"is {word} in the sharded run and the baseline and the oracle\n  the model, ")


def test_a_run_that_is_finite_where_the_others_are_not(step):
    step[1].losses[0].fill_(float("nan"))
    finding = compare(step)
    assert finding.text == "is NaN in the baseline, finite in the sharded run and the oracle"
    assert (finding.location.stage, finding.location.element) == (Stage.LOSS, None)


def test_noise_under_adam_is_left_out(step):
    sharded, _, oracle = step
    oracle.gradients["weight"][1, 2] = 1e-12
    sharded.gradients["weight"].tensor[1, 2] = 1e-12
    sharded.parameters["weight"].tensor[1, 2] += 1.0
    step[1].gradients["weight"].tensor[1, 2] = 1e-12
    assert compare(step).location.stage == Stage.PARAMETER
    assert compare(step, adaptive=True) is None
    sharded.parameters["weight"].tensor[0, 0] += 1.0
    assert compare(step, adaptive=True).location.element == (0, 0)


AVERAGE = torch.tensor([3.0, -1.0])
OWN = [torch.tensor([2.0, 1.0]), torch.tensor([4.0, -3.0])]


@pytest.mark.parametrize(
    ("gradient", "told"),
    [
        (AVERAGE * 2, "2 times the oracle's everywhere, as when the division by the 2 ranks is missing"),
        (AVERAGE / 2, "0.5 times the oracle's everywhere, as when the average over the 2 ranks is divided twice"),
        (OWN[1], "this rank's own gradient, as when the reduction over the ranks is missing"),
        (OWN[0], "the gradient of rank 0 alone"),
        (OWN[1] / 2, "this rank's own gradient divided by 2"),
        (AVERAGE + OWN[1] / 2, "it counts rank 1 twice"),
        (AVERAGE * 0, "it is zero"),
    ],
)
def test_guess_of_a_wrong_gradient(gradient, told):
    assert told in guess_gradient(gradient, AVERAGE, OWN, rank=1).render(is_shared=True)
    assert guess_gradient(torch.tensor([9.0, 9.0]), AVERAGE, OWN, rank=1) is None


def test_guess_of_a_contribution_that_is_missing():
    own = [torch.randn(8) for _ in range(3)]
    average = sum(own) / 3
    missing = guess_gradient(average - own[2] / 3, average, own, rank=0)
    assert missing.render(is_shared=True) == "it is reduced without rank 2"


def test_guess_of_a_wrong_norm():
    assert "this rank's shards alone, as when" in guess_norm(3.0, 5.0, 3.0, 2, 2.0).render(is_shared=True)
    assert "replicated parts" in guess_norm(5.0 * 2**0.5, 5.0, 3.0, 2, 2.0).render(is_shared=True)
    assert guess_norm(4.0, 5.0, 3.0, 2, 2.0) is None


def told_of(step):
    return compare(step).render(title="title")


def test_clipping_that_did_nothing_is_called_so(step):
    step[0].clipped["weight"] = step[0].gradients["weight"]
    assert "\n  it equals the gradient before clipping: clipping did nothing to it" in told_of(step)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_rounding_to_a_narrower_dtype_is_recognised(step, name):
    dtype = getattr(torch, name)
    exact = step[2].gradients["weight"]
    step[0].gradients["weight"] = whole(exact.to(dtype).float())
    assert f"\n  it equals the expected value rounded to {name}" in told_of(step)
    step[0].gradients["weight"] = whole((exact * (1 + 2 * torch.finfo(dtype).eps)).to(dtype).float())
    assert f"\n  all of its elements are {name} numbers: it was rounded to {name} on its way" in told_of(step)


def test_errors_of_the_size_of_roundings_are_called_so():
    """Sums of rounded values are not rounded themselves; what is wrong in one element only is no rounding."""
    torch.manual_seed(0)
    parts = torch.randn(4, 64)
    exact = parts.double().sum(0)
    magnitude = float(exact.abs().max())
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16 or TF32")):
        rounded = parts.to(dtype).float().sum(0) + torch.rand(64) * 2**-22
        told = guess_from_values(rounded, exact, magnitude=magnitude)
        assert told.seen == f"its errors are as large as rounding to {name} makes"
    wrong = exact.float()
    wrong[5] += 0.01 * magnitude
    assert guess_from_values(wrong, exact, magnitude=magnitude) is None
    scaled = guess_from_values(exact.float() * 1.01, exact, magnitude=magnitude)
    assert scaled.seen == "it is 1.01 times the oracle's everywhere"
    whole_numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert guess_from_values(whole_numbers.flip(0), whole_numbers, magnitude=4.0) is None


def test_exact_difference():
    first = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    second = first.clone()
    assert exact_difference(first, second) is None
    second[1, 0] = 3.5
    assert exact_difference(first, second) == ((1, 0), 3.0, 3.5)


def test_units_and_their_sizes():
    model = models.Tower(dim=5, depth=2)
    units = units_of(model, (("layers.0",), ("layers.1",)), traits=Traits(), size=4)
    assert [unit.label for unit in units] == ["layers.0", "layers.1", ROOT]
    assert units[-1].names == ("out.weight", "out.bias")
    # Rows of 5 are padded to 8: the weight's 25 elements take 40, the bias's 5 take 8.
    assert (units[-1].numel, units[-1].padded_numel) == (30, 48)
    lookup = UnitLookup(units)
    assert [lookup("all_gather", "float32", nbytes) for nbytes in (120, 192)] == [ROOT, ROOT]
    assert lookup("all_gather", "bfloat16", 96) == ROOT
    assert lookup("broadcast", "float32", 120) == ""
    assert lookup("all_gather", "float32", 4) == ""


def test_shared_modules_belong_to_the_inner_unit():
    model = models.Tower(dim=5, depth=1)
    units = units_of(model, (("layers.0",), ("layers.0.in_proj",)), traits=Traits(), size=2)
    assert [unit.label for unit in units] == ["layers.0.in_proj", "layers.0", ROOT]


class Unsharded(DdpAdapter):
    """Claims to shard, and does not."""

    name = "unsharded"
    traits = Traits(shards=frozenset({"parameters"}))


@world(2)
def test_a_model_that_is_not_sharded_is_found_out(rank: Rank):
    rank.implementation = Unsharded
    with pytest.raises(Divergence, match="claims to shard parameters, and every rank holds all of them"):
        rank.run(models.two_linear((90, 80), (80, 10)))


@world(2)
def test_a_model_without_parameters_can_be_run(rank: Rank):
    run = rank.run(torch.nn.Tanh())
    assert torch.equal(run.adapter.forward(torch.zeros(2)), torch.zeros(2))


@world(2)
def test_clipping_that_does_not_fire_proves_nothing(rank: Rank):
    rank.implementation = DdpAdapter
    pair = rank.pair(models.MLP(4), clip=Clip(max_norm=1e6))
    pair.step(rank.batch(0, (2, 4)))
    with pytest.raises(AssertionError, match="clipping at 1e\\+06 did nothing"):
        pair.check()


@world(2)
def test_ranks_see_different_data_and_all_raise_together(rank: Rank):
    batches = rank.exchange(rank.batch(0, (4,)))
    assert not torch.equal(batches[0], batches[1])
    assert torch.equal(rank.batch(0, (4,)), rank.batch(0, (4,)))
    assert not torch.equal(rank.batch(0, (4,)), rank.batch(1, (4,)))
    location = raised(rank, TwiceOnRankOne).location
    assert (location.rank, location.stage) == (1, Stage.GRADIENT)


class Twice(DdpAdapter):
    """Its gradients are doubled, on all ranks."""

    name = "twice"
    doubles = (0, 1)

    def gradients(self):
        pieces = copy.deepcopy(super().gradients())
        for piece in pieces.values():
            piece.tensor.mul_(2 if torch.distributed.get_rank() in self.doubles else 1)
        return pieces


class TwiceOnRankOne(Twice):
    """Its gradients are doubled on rank 1 alone."""

    name = "twice-on-rank-one"
    doubles = (1,)


def raised(rank, implementation):
    rank.implementation = implementation
    pair = rank.pair(models.MLP(4))
    pair.step(rank.batch(0, (2, 4)))
    with pytest.raises(Divergence) as caught:
        pair.check()
    return caught.value


@world(2)
def test_what_only_one_rank_sees_has_no_cause_in_all(rank: Rank):
    """A doubled gradient is a missing division only if every rank has one."""
    told = str(raised(rank, TwiceOnRankOne))
    assert "(step 0) on rank 1" in told
    assert "\n  it is 2 times the oracle's everywhere\n  rank 1 alone: no other rank diverges at this stage" in told
    told = str(raised(rank, Twice))
    assert "everywhere, as when the division by the 2 ranks is missing" in told
    assert "\n  rank 1 diverges at the same stage" in told


@world(2)
def test_ranks_that_diverge_in_another_step_are_not_named(rank: Rank):
    location = Location(stage=Stage.GRADIENT, step=rank.index, rank=rank.index)
    with pytest.raises(Divergence, match="first step") as caught:
        rank.agree(Finding(location, "text"), title="title")
    alone = "  rank 0 alone: no other rank diverges at this stage"
    assert str(caught.value) == f"title: gradient in the first step (step 0) on rank 0\n  text\n{alone}"


@pytest.mark.parametrize(
    ("step", "told"),
    [(0, "in the first step (step 0)"), (9, "in the tenth step (step 9)"), (10, "in step 10 (counted from 0)")],
)
def test_steps_are_named_unambiguously(step, told):
    assert str(Location(stage=Stage.LOSS, step=step, rank=3)) == f"loss {told} on rank 3"


class Resharding(ReferenceAdapter):
    """One unit is not resharded after its forward."""

    name = "resharding"

    def forward(self, *arguments, submodule=""):
        self.submodule("layers.1").set_reshard_after_forward(False)
        return super().forward(*arguments, submodule=submodule)


@world(2)
def test_a_unit_that_never_resharded_is_named(rank: Rank):
    rank.implementation = Resharding
    model = models.Tower(dim=9, depth=3)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=True)
    pair.step(rank.batch(0, (4, 9)))
    pair.check()
    told = r"3 all_gather instead of 4 in backward: .*; none of layers.1, as when it was not resharded after forward"
    with pytest.raises(Divergence, match=told) as caught:
        pair.check_counts("backward", all_gather=4, reduce_scatter=4)
    assert caught.value.location.name == "layers.1"


@world(2)
def test_a_unit_with_the_values_of_an_earlier_step_is_named(rank: Rank):
    """The output diverges; the failure also names the unit that was not gathered again."""
    rank.implementation = ReferenceAdapter
    model = models.Tower(dim=9, depth=3)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=True)
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
    last = pair.last_trace()
    (stale,) = [item for item in last if (item.phase, item.kind, item.unit) == ("forward", "all_gather", "layers.1")]
    del pair.sharded.trace[len(pair.sharded.trace) - len(last) + last.index(stale)]
    pair._unchecked[1].sharded.outputs[0][0][0] += 1.0
    with pytest.raises(Divergence) as caught:
        pair.check()
    assert "output of 'microbatch 0, tensor 0' in the second step (step 1)" in str(caught.value)
    told = "this forward did not gather layers.1, the first step's did, as when it was never resharded"
    assert f"\n  {told}\n" in str(caught.value)


@world(2)
def test_an_evaluation_after_the_last_step_may_diverge(rank: Rank):
    pair = rank.pair(models.Tower(dim=9))
    pair.step(rank.batch(0, (4, 9)))
    pair.evaluate(rank.batch(1, (4, 9)))
    pair._unchecked[-1].outputs[0][0] += 1.0
    with pytest.raises(Divergence, match="output of 'evaluation, tensor 0'"):
        pair.check()


@world(1)
def test_an_option_that_does_not_exist_is_one_line(rank: Rank):
    for make in (rank.pair, rank.run):
        text = error_of(make, models.MLP(4), reshard=True)
        assert text.startswith("unknown option 'reshard'; known are accumulation, after_backward, ")


def trained(rank, model, **options):
    pair = rank.pair(model, **options)
    pair.step(rank.batch(0, shape=(2, 6)))
    return pair


@world(2)
def test_a_pair_that_is_not_checked(rank: Rank):
    pair = trained(rank, nn.Linear(6, 6))
    pair.step(rank.batch(1, shape=(2, 6)))
    with pytest.raises(AssertionError, match=r"^steps 0 to 1 of a pair were trained and never compared: call check"):
        rank.assert_compared()
    pair.check()
    rank.assert_compared()
    pair.step(rank.batch(2, shape=(2, 6)))
    with pytest.raises(AssertionError, match=r"^step 2 of a pair was trained and never compared"):
        rank.assert_compared()
    pair.check()
    pair.evaluate(rank.batch(3, shape=(2, 6)))
    with pytest.raises(AssertionError, match="an evaluation of a pair was never compared"):
        rank.assert_compared()
    pair.check()


@world(2)
def test_dropout_is_named(rank: Rank):
    pair = trained(rank, nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)))
    with pytest.raises((RuntimeError, Divergence), match="the model or the loss draws random numbers, other ones in"):
        pair.check()


@world(2)
def test_a_list_of_weights_outside_of_the_parameters_is_named(rank: Rank):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 64)
            self.kept = [*self.lstm.parameters()]

        def forward(self, x):
            return self.lstm(x)[0]

    kept = r"the model \(\w*Recurrent\) keeps \d+ bytes of tensors in 'kept'"
    with pytest.raises(Divergence, match=rf"registered parameters hold \d+ bytes, the largest '.*\n.*\n?.*{kept}"):
        rank.run(Recurrent())


def _token_mean(output, labels, *, tokens=None):
    """The mean over the tokens that have a label, or the sum over them, divided by so many."""
    kind = "mean" if tokens is None else "sum"
    value = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction=kind)
    return value if tokens is None else value / tokens


@world(2)
def test_a_token_mean_that_is_wrong_under_ddp_too(rank: Rank):
    batch = [rank.tokens(0, (2, 8), vocabulary=16, microbatch=number) for number in range(2)]
    labels = [one.clone() for one in batch]
    for number, one in enumerate(labels):
        one[:, 6 - 4 * rank.index + number :] = -100
    own = rank.exchange([int((one >= 0).sum()) for one in labels])
    right = sum(map(sum, own)) / rank.world_size  # the average over ranks makes all tokens of it

    def check(tokens, baseline):
        model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
        pair = rank.pair(model, baseline=baseline, microbatches=2, clip=Clip(max_norm=1e-3))
        loss = functools.partial(_token_mean, tokens=tokens)
        pair.checked_step(batch, labels=labels, loss=loss, global_loss=_token_mean)

    check(right, "single-process")
    check(None, "ddp")
    with pytest.raises(Divergence) as caught:
        check(None, "single-process")
    told = [f"rank {r} microbatch {m} x {right / own[r][m]:.4g}" for r in (0, 1) for m in (0, 1)]
    assert ", ".join(told) in str(caught.value)


class Shifted(nn.Module):
    """The gradient of its first element is rounding noise in the first step, and not in the second."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([torch.zeros(1), torch.randn(8)]))

    def forward(self, x):
        shift, scale = self.weight[0], self.weight[1:]
        return nn.functional.layer_norm(x * scale + shift, (8,)) * x * (1 + shift**2)


@world(2)
@pytest.mark.parametrize("baseline", ["ddp", "single-process"])
def test_later_steps_of_adam_are_judged_from_the_state_of_the_run(rank: Rank, baseline: str):
    pair = rank.pair(Shifted(), optimizer=optim.adamw(), baseline=baseline)
    for number in range(4):
        pair.step(rank.batch(number, (4, 8)))
    pair.check()
    next(iter(pair.adapter.optimizer.state.values()))["exp_avg"].zero_()
    pair.step(rank.batch(4, (4, 8)))
    with pytest.raises(Divergence, match="in the fifth step"):
        pair.check()
