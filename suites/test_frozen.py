"""Chapter FROZEN: parameters that need no gradient."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Pair, Rank, contract, models, needs, world
from shardproof.testing.axes import RESHARD, RESHARD_EXPLICIT, subjects, with_first
from shardproof.testing.compare import check_bits, in_one_tensor_with, step_label
from shardproof.testing.make import (
    Accumulation,
    Precision,
    everywhere,
    pair_by_units,
    pair_of_mlps,
    run_by_units,
    tower,
    two_runs,
)
from shardproof.testing.measure import Census
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import batches, checked_steps, parallel, shapes, train_and_check

pytestmark = world(2)

DEPTH = 3

#: Frozen parameters, by name.
FROZEN: dict[str, Callable[[str], bool]] = {
    "first": lambda name: name.startswith("layers.0."),
    "middle": lambda name: name.startswith("layers.1."),
    "last": lambda name: name.startswith("layers.2."),
    "root": lambda name: name.startswith("out."),
    "all-but-one": lambda name: not name.startswith("layers.1."),
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "another-dtype": lambda name: name.startswith("layers.1."),
}


class Gate(models.MLP):
    """A frozen MLP whose output requires no gradient."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class FeatureScale(nn.Module):
    """Multiplies by a factor for each feature, in bfloat16, which loses nothing in any wider dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(dim, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.to(x.dtype)


class Gated(models.Tower):
    """A :class:`Tower` whose layer 1 is a :class:`Gate`, which scales what layer 0 passes to layer 2.

    ``is_recorded`` says whether it is called with autograd enabled.
    """

    def __init__(self, dim: int, *, is_recorded: bool) -> None:
        super().__init__(dim)
        self.layers[1] = Gate(dim).requires_grad_(False)
        self.is_recorded = is_recorded

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        first, gate, last = self.layers
        x = first(x)
        with torch.set_grad_enabled(self.is_recorded):
            scale = gate(x)
        return last(x * scale)  # type: ignore[no-any-return]


@contract("FROZEN-1")
@world(2, 4)
@pytest.mark.parametrize(
    ("what", "reshard_after_forward"), [*((what, None) for what in FROZEN), *with_first("middle", RESHARD_EXPLICIT)]
)
def test_frozen_before_sharding(rank: Rank, what: str, reshard_after_forward: bool | int | None) -> None:
    """Frozen units, and frozen parameters within units, get no gradient and keep their bits; the others train."""
    pair = pair_by_units(rank, _tower(what), reshard_after_forward=reshard_after_forward)
    before = _frozen_values(pair, what)
    for step in range(3):
        _assert_requires_grad(pair, what, f"before {step_label(step)}")
        pair.checked_step(rank.batch(step, (4, 9)), set_to_none=step % 2 == 0)
    _assert_requires_grad(pair, what, "after training")
    for name, value in _frozen_values(pair, what).items():
        check_bits(f"{name} is frozen and moved", before[name], value, sides="before, after")


@contract("FROZEN-1")
@needs(Capability.DEFERRED_REDUCTION)
@subjects("what", ["middle", "weights", "biases"])
def test_frozen_between_microbatches(rank: Rank, what: str) -> None:
    """While reductions are deferred, frozen parameters have no gradient, and get none from the last microbatch."""
    run = run_by_units(rank, _tower(what), microbatches=2, accumulation=Accumulation())
    for number in range(2):
        with run.adapter.microbatch(is_last=number == 1):
            run.forward_backward((rank.batch(0, (4, 9), microbatch=number),), loss=models.mean_square)
        shown = {**run.adapter.held_parameters(), **run.adapter.named_parameters()}
        is_frozen = _frozen_in(shown, what)
        wrong = [name for name, parameter in shown.items() if is_frozen(name) and parameter.grad is not None]
        assert not wrong, f"after microbatch {number} frozen parameters have gradients: {', '.join(wrong)}"


@contract("FROZEN-2")
@needs(Capability.COUNTED_UNITS)
@subjects("what", ["first", "middle", "last", "root", "all-but-one"])
def test_frozen_units_are_not_reduced(rank: Rank, what: str) -> None:
    """A unit is reduced once in a step exactly if it has a trainable parameter; forward gathers it all the same."""
    pair = pair_by_units(rank, _tower(what))
    for step in checked_steps(pair, batches(rank, 2, (4, 9))):
        reduced = sorted(item.unit for item in pair.last_trace() if item.kind == "reduce_scatter")
        expected = sorted(unit.label for unit in pair.units if not all(map(FROZEN[what], unit.names)))
        assert reduced == expected, f"{step_label(step)} reduces {reduced} with {what!r} frozen"
        pair.check_counts("forward", all_gather=DEPTH + 1)


def _step_and_check_freed(rank: Rank, pair: Pair, census: Census, step: int, frozen: str) -> None:
    """Train a step, in which backward frees a frozen unit before it reaches the first layer."""
    census.moments.clear()
    pair.step(rank.batch(step, (4, 9)))
    (first,) = [moment for moment in census.moments if (moment.phase, moment.unit) == ("backward", "layers.0")]
    # On a device the bytes may go back later, once the work that reads them has run.
    assert frozen not in first.held or rank.device.type != "cpu", (
        f"{frozen} is still gathered when the backward of layers.0 begins in {step_label(step)}"
    )
    pair.check()


@contract("FROZEN-3")
@needs(Capability.SHARDED)
@subjects("what", ["middle", "last"])
def test_frozen_units_are_freed_in_backward(rank: Rank, what: str) -> None:
    """A frozen unit that backward has passed is freed before the backward of the unit before it begins."""
    pair = pair_by_units(rank, _tower(what))
    census = Census(pair.sharded)
    for step in range(2):
        _step_and_check_freed(rank, pair, census, step, f"layers.{1 if what == 'middle' else 2}")


@contract("FROZEN-3", "FROZEN-4")
@needs(Capability.SHARDED, Capability.UNUSED_OUTPUT)
def test_units_frozen_between_steps_are_freed_in_backward(rank: Rank) -> None:
    """A unit frozen between two steps is freed, once backward has passed it, in the first step that follows."""
    pair = tower(rank, baseline="replicated", find_unused_parameters=True)
    census = Census(pair.sharded)
    for step, freezes in enumerate([False, True, False, True]):
        for named in everywhere(pair):
            _freeze(named, FROZEN["middle"] if freezes else lambda name: False)
        _step_and_check_freed(rank, pair, census, step, "layers.1")


@contract("FROZEN-3")
@needs(Capability.SHARDED)
def test_frozen_units_with_keywords_are_freed_in_backward(rank: Rank) -> None:
    """A frozen unit whose inputs come by keyword and in containers is freed once backward has passed it."""
    pair = pair_by_units(rank, _frozen(shapes.Keywords(9), FROZEN["middle"]))
    census = Census(pair.sharded)
    for step in range(2):
        _step_and_check_freed(rank, pair, census, step, "layers.1")


@contract("FROZEN-1")
@needs(Capability.MULTIPLE_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_frozen_unit_that_runs_twice(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A frozen unit that runs twice in a forward, and that backward passes twice, is gathered for both."""
    model = _frozen(models.ReusedInner(9), lambda name: name.startswith("inner."))
    pair = rank.pair(model, units=[["before"], ["inner"], ["outer"]], reshard_after_forward=reshard_after_forward)
    train_and_check(pair, batches(rank, 3, (4, 9)), set_to_none="even")


@contract("FROZEN-1")
@subjects("is_recorded", [False, True], ids=["under-no-grad", "with-autograd"])
@pytest.mark.parametrize("ahead", [None, pytest.param(True, marks=needs(Capability.BACKWARD_PREFETCH))])
def test_frozen_unit_without_a_gradient_for_its_input(rank: Rank, ahead: bool | None, is_recorded: bool) -> None:
    """A frozen unit whose input requires a gradient and whose output does not leaves the units around it right."""
    pair = pair_by_units(rank, Gated(9, is_recorded=is_recorded), forward_prefetch=ahead)
    train_and_check(pair, batches(rank, 3, (4, 9)), set_to_none="even")


@contract("FROZEN-5")
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
def test_backward_gathers_no_unit_in_vain(rank: Rank) -> None:
    """Frozen units before the first trainable one have no backward, and are gathered in forward alone."""
    model = _frozen(models.Tower(dim=9), lambda name: name.startswith(("layers.0.", "layers.1.")))
    pair = pair_by_units(rank, model, reshard_after_forward=True)
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        gathered = [item.unit for item in pair.last_trace() if (item.phase, item.kind) == ("backward", "all_gather")]
        layers = [unit for unit in gathered if unit.startswith("layers.")]
        assert layers == ["layers.2"], f"the backward of {step_label(step)} gathers {gathered}"
        pair.check()


@contract("FROZEN-6")
@world(2, 4)
@needs(Capability.REGISTERED_STATE)  # flat parameters have one dtype
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_frozen_of_another_dtype(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A unit may have frozen parameters of another dtype: each keeps its dtype and its values, and the others train."""
    model = shapes.TwoScales(5, 3, 5)
    model.weight = nn.Parameter(torch.randn(5, 5).half(), requires_grad=False)
    # After 15 or 25 elements of two bytes, in whatever order the parameters are laid out.
    model.register_parameter("unused", nn.Parameter(torch.randn(5, 1), requires_grad=False))
    nn.init.normal_(model.low.weight)
    # One comes before the trainable ones, as where user code adds trained parts to a frozen layer.
    trained = model.low._parameters.pop("weight")
    model.low.register_parameter("kept", nn.Parameter(torch.randn(3, 5).half(), requires_grad=False))
    model.low.register_parameter("weight", trained)
    plain = copy.deepcopy(model).to(rank.device)
    dtypes = {name: parameter.dtype for name, parameter in plain.named_parameters()}
    run = rank.run(model, reshard_after_forward=reshard_after_forward)
    inputs = torch.full((5, 5), float(rank.index + 1), device=rank.device)
    average = (rank.world_size + 1) / 2
    for step in range(2):
        output = run.adapter.forward(inputs)
        check_bits(f"output of {step_label(step)}", output.detach(), plain(inputs).detach())
        found = {name: piece.tensor.dtype for name, piece in run.adapter.registered().items()}
        assert found == dtypes, f"after the forward of {step_label(step)}"
        run.adapter.backward(output.sum())
        gradients = run.adapter.gradients()
        wrong = [name for name in ("weight", "unused", "low.kept") if gradients[name] is not None]
        assert not wrong, f"frozen and with a gradient: {wrong}"
        piece = gradients["low.weight"]
        assert piece is not None, "low.weight has no gradient"
        assert piece.tensor.eq(average).all(), f"gradient of 'low.weight': {piece.tensor} instead of {average}"
        assert piece.tensor.dtype == torch.float32, f"the gradient of 'low.weight' is {piece.tensor.dtype}"
        run.adapter.zero_grad(set_to_none=True)


@contract("FROZEN-6")
@needs(Capability.REGISTERED_STATE, "precision.param_dtype")
def test_frozen_integers(rank: Rank) -> None:
    """A frozen integer parameter keeps its values next to others that are cast to a compute dtype."""
    # They have even numbers of elements in bfloat16, which are no multiples of eight bytes.
    model = shapes.Permuted(6)
    plain = copy.deepcopy(model).to(rank.device)
    plain.inner.bfloat16()
    run = rank.run(model, precision=Precision(param_dtype=torch.bfloat16))
    for step in range(2):
        batch = rank.batch(step, (4, 6))
        output = run.adapter.forward(batch)
        check_bits(f"output of {step_label(step)}", output.detach(), plain(batch.bfloat16()).detach())
        found = run.adapter.registered()["order"].tensor.dtype
        assert found == torch.int64, f"order has the dtype {found} after the forward of {step_label(step)}"
        run.adapter.backward(output.sum())
        assert run.adapter.gradients()["order"] is None, "order is frozen and has a gradient"


@contract("FROZEN-6")
@needs(Capability.REGISTERED_STATE, Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize("evaluates", [False, True])
def test_frozen_integers_with_a_cast(rank: Rank, evaluates: bool) -> None:
    """A frozen integer parameter keeps its values next to others that are cast after sharding."""
    model = shapes.Permuted(6)
    plain = copy.deepcopy(model).to(rank.device)
    run = rank.run(model)
    if evaluates:
        run.evaluate((rank.batch(0, (4, 6)),))
    run.adapter.module.to(torch.bfloat16)
    plain.to(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in plain.named_parameters()}
    for step in range(2):
        batch = rank.batch(step, (4, 6)).to(torch.bfloat16)
        output = run.adapter.forward(batch)
        check_bits(f"output of {step_label(step)}", output.detach(), plain(batch).detach())
        run.adapter.backward(output.sum())
        found = {name: piece.tensor.dtype for name, piece in run.adapter.registered().items()}
        assert found == dtypes, f"after the backward of {step_label(step)} the parameters have the dtypes {found}"
        run.adapter.zero_grad(set_to_none=True)


@contract("FROZEN-6")
@needs(Capability.REGISTERED_STATE, "precision.param_dtype")
def test_trainable_of_another_dtype(rank: Rank) -> None:
    """A trainable parameter of a second dtype is refused before anything is sent, or has a gradient of that dtype."""
    model, batch = shapes.Spoiled(torch.randn(3, dtype=torch.float64)), rank.batch(0, (4, 9))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    run = rank.run(model, precision=Precision(param_dtype=torch.bfloat16))
    refusal = Refusal(rank, lambda: run.adapter.forward(batch))
    if refusal.text is not None:
        refusal.check_names("float64", "dtype")
        return
    run.adapter.backward(refusal.result.sum())
    found = {name: None if piece is None else piece.tensor.dtype for name, piece in run.adapter.gradients().items()}
    assert found == dtypes, f"the gradients have the dtypes {found}"


@contract("FROZEN-6")
@needs(Capability.GRADIENT_DTYPE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_gradients_of_several_dtypes(rank: Rank, dtype: torch.dtype) -> None:
    """Gradients of two dtypes in a unit are reduced in the dtype that they promote to, and each adds up in its own."""
    model = shapes.TwoScales(5, 3, 5).bfloat16()
    model.weight.grad_dtype = dtype
    run = rank.run(model)
    inputs = torch.full((5, 5), 1.0 if rank.index else 256.0, device=rank.device)
    for step in range(3):
        run.forward_backward((inputs,), loss=torch.sum)
        gradients = run.adapter.gradients()
        # The average is 128.5, which is no bfloat16 number.
        for name, kept, average in (("weight", dtype, 128.5), ("low.weight", torch.bfloat16, 128.0)):
            piece = gradients[name]
            assert piece is not None, f"{name} has no gradient in {step_label(step)}"
            assert piece.tensor.dtype == kept, f"the gradient of {name!r} is {piece.tensor.dtype}"
            wrong = f"gradient of {name!r} in {step_label(step)}: {piece.tensor} instead of {average * (step + 1)}"
            assert piece.tensor.eq(average * (step + 1)).all(), wrong
    reduced = {item.dtype for item in run.trace if item.kind in ("reduce_scatter", "all_reduce")}
    assert reduced == {"float32"}, f"gradients are reduced in {reduced}"


@contract("FROZEN-6")
@needs(Capability.GRADIENT_DTYPE)
def test_gradients_whose_dtype_changes(rank: Rank) -> None:
    """Gradients of any dtype (``grad_dtype`` None) add up in that of the first, whichever autograd computes later."""
    model = shapes.TwoScales(5, 3, 5).bfloat16()
    model.weight.grad_dtype = None
    run, sums = rank.run(model), {"weight": 0.0, "low.weight": 0.0}
    # The dtype of the inputs, which is that of the gradient of weight, and their values on the ranks. 128.5 is no
    # bfloat16 number.
    backwards = [(torch.float32, (256.0, 1.0)), (torch.bfloat16, (256.0, 2.0)), (torch.float32, (256.0, 1.0))]
    for step, (dtype, values) in enumerate(backwards):
        inputs = torch.full((5, 5), values[rank.index], dtype=dtype, device=rank.device)
        run.forward_backward((inputs,), loss=torch.sum)
        gradients, average = run.adapter.gradients(), sum(values) / 2
        for name, kept in (("weight", torch.float32), ("low.weight", torch.bfloat16)):
            sums[name] = float(torch.tensor(sums[name] + average).to(kept))
            piece = gradients[name]
            assert piece is not None, f"{name} has no gradient in {step_label(step)}"
            assert piece.tensor.dtype == kept, f"the gradient of {name!r} is {piece.tensor.dtype} in {step_label(step)}"
            wrong = f"gradient of {name!r} in {step_label(step)}: {piece.tensor} instead of {sums[name]}"
            assert piece.tensor.eq(sums[name]).all(), wrong


@contract("FROZEN-4")
@world(2, 4)
@needs(Capability.UNUSED_OUTPUT)  # an implementation that, like DDP, decides at construction what it reduces lacks it
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_frozen_between_steps(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Freezing and thawing between two steps holds from the next forward on, whatever was frozen before sharding."""
    options: Any = {
        "baseline": "replicated",
        "reshard_after_forward": reshard_after_forward,
        "find_unused_parameters": True,
    }
    pair = pair_by_units(rank, _tower("middle"), **options)
    for step, what in enumerate(["weights", "middle", "biases", "first", "all-but-one"]):
        _step_frozen(rank, pair, step, what, pair.adapter.named_parameters())


@contract("FROZEN-4")
@needs(Capability.UNUSED_OUTPUT, "flat_parameters")
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_flat_frozen_between_steps(rank: Rank, reshard_after_forward: bool | None) -> None:
    """Freezing all or none of a flat parameter between two steps holds from the next forward on."""
    options: Any = {
        "find_unused_parameters": True,
        "flat_parameters": True,
        "reshard_after_forward": reshard_after_forward,
    }
    pair = tower(rank, baseline="replicated", **options)
    for step, layer in enumerate(["", "layers.1.", "layers.0.", "", "layers.1."]):
        for named in everywhere(pair):
            for name, parameter in named.items():
                parameter.requires_grad_(not layer or not name.startswith(layer))
        pair.checked_step(rank.batch(step, (4, 9)))
        reduced = {item.unit for item in pair.last_trace() if item.kind == "reduce_scatter"}
        assert layer[:-1] not in reduced, f"{layer[:-1]} is frozen and reduced in {step_label(step)}"


@contract("FROZEN-4")
@world(2, 4)
@needs(Capability.UNUSED_OUTPUT)
@pytest.mark.parametrize("form", ["held", "shown", pytest.param("saved", marks=needs(Capability.REGISTERED_STATE))])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_frozen_after_an_evaluation(rank: Rank, reshard_after_forward: bool | int | None, form: str) -> None:
    """Freezing the optimizer's or the registered parameters after an evaluation holds from the next forward on.

    It holds also if user code saves the model next, which frees the units that the evaluation left gathered.
    """
    pair = tower(rank, baseline="replicated", reshard_after_forward=reshard_after_forward, find_unused_parameters=True)
    adapter = pair.adapter
    for step, what in enumerate(["middle", "biases", "root", "all-but-one"]):
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1))
        named = adapter.held_parameters() if form == "held" else adapter.named_parameters()
        if form == "saved":
            _freeze(named, _frozen_in(named, what))
            adapter.module.state_dict()
        _step_frozen(rank, pair, step, what, named)


@contract("FROZEN-4")
@needs(Capability.UNUSED_OUTPUT, Capability.OWN_OPTIMIZER)  # an engine has no gradients between microbatches
@pytest.mark.parametrize("what", ["middle", "weights", "biases"])
def test_frozen_after_a_microbatch(rank: Rank, what: str) -> None:
    """Parameters that user code freezes between two microbatches get no gradient of the second, and others do."""
    model = models.Tower(dim=9)
    run, twin = two_runs(rank, model, microbatches=2)
    reducing = run_by_units(rank, models.copy_of(model), microbatches=2)
    with reducing.adapter.microbatch(is_last=True):
        reducing.forward_backward((rank.batch(0, (4, 9), microbatch=0),), loss=models.mean_square)
    first = {name: piece.tensor for name, piece in reducing.adapter.gradients().items() if piece is not None}
    # Where reductions are deferred, a frozen parameter may keep this rank's own gradient, which is full.
    plain = models.copy_of(model).to(rank.device)
    models.mean_square(plain(rank.batch(0, (4, 9), microbatch=0))).backward()
    is_frozen = _frozen_in(run.adapter.named_parameters(), what)
    for number in range(2):
        for one in (run, twin):
            with one.adapter.microbatch(is_last=number == 1):
                one.forward_backward((rank.batch(0, (4, 9), microbatch=number),), loss=models.mean_square)
        if number == 0:
            _freeze(run.adapter.named_parameters(), is_frozen)
    expected = twin.adapter.gradients()
    for name, piece in run.adapter.gradients().items():
        other = expected[name]
        if piece is None or other is None:
            assert is_frozen(name) or piece is other, f"{name} has a gradient in one of the runs alone"
            continue
        if is_frozen(name) and torch.equal(piece.tensor, cast(torch.Tensor, plain.get_parameter(name).grad)):
            continue
        check_bits(f"gradient of {name!r}", piece.tensor, first[name] if is_frozen(name) else other.tensor)


@contract("FROZEN-1")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
@pytest.mark.parametrize(
    ("what", "data"), [("middle", 2), ("biases", 2), pytest.param("biases", 1, marks=needs(Capability.SINGLE_RANK))]
)
def test_frozen_with_tensor_parallelism(rank: Rank, what: str, data: int) -> None:
    """Tensor-parallel parameters that are frozen between two microbatches get no gradient of the second."""
    mesh, model = rank.mesh((data, 4 // data), ("dp", "tp")), _frozen(parallel.MLPStack(5), FROZEN[what])
    pair = pair_of_mlps(rank, mesh, model)
    for step in range(2):
        _assert_requires_grad(pair, what, f"before {step_label(step)}")
        pair.checked_step(rank.batch(step, (4, 5), mesh=mesh["dp"]), set_to_none=step % 2 == 0)
    _assert_requires_grad(pair, what, "after training")


def _frozen_in(named: Mapping[str, torch.Tensor], what: str) -> Callable[[str], bool]:
    """Which parameters user code can freeze: a flat chunk that has several only if all of them are to be frozen."""
    trained = in_one_tensor_with({name for name in named if not FROZEN[what](name)}, named)
    return lambda name: name not in trained


def _freeze(named: dict[str, nn.Parameter], is_frozen: Callable[[str], bool]) -> None:
    for name, parameter in named.items():
        parameter.requires_grad_(not is_frozen(name))


def _frozen(model: Any, is_frozen: Callable[[str], bool]) -> Any:
    """The model, with some of its parameters frozen."""
    _freeze(dict(model.named_parameters()), is_frozen)
    return model


def _tower(what: str) -> Any:
    model = models.Tower(dim=9)
    if what == "another-dtype":
        model.layers[1] = FeatureScale(9)
    return _frozen(model, FROZEN[what])


def _step_frozen(rank: Rank, pair: Pair, step: int, what: str, named: dict[str, nn.Parameter]) -> None:
    """Set the ``named`` parameters of the run, the baseline and the oracle to frozen or not, and compare a step."""
    is_frozen = _frozen_in(named, what)
    for found in (named, *everywhere(pair)[1:]):
        _freeze(found, is_frozen)
    pair.checked_step(rank.batch(step, (4, 9)))
    _assert_requires_grad(pair, what, f"after {step_label(step)}")


def _assert_requires_grad(pair: Pair, what: str, when: str) -> None:
    named = pair.adapter.named_parameters()
    is_frozen = _frozen_in(named, what)
    wrong = sorted(name for name, value in named.items() if value.requires_grad == is_frozen(name))
    assert not wrong, f"{when} requires_grad is {named[wrong[0]].requires_grad} of {', '.join(wrong)}"


def _frozen_values(pair: Pair, what: str) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards of the frozen parameters."""
    pieces = pair.adapter.parameters()
    return {name: piece.tensor.clone() for name, piece in pieces.items() if FROZEN[what](name)}
