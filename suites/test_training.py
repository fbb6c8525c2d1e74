"""Chapter TRAINING: a sharded run trains the same model as its baseline."""

import copy
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardproof.testing import Capability, Hardware, Pair, Rank, contract, each_value, models, needs, world
from shardproof.testing.axes import DELAY_MS, DELAYED, DELAYS, FLAT, RESHARD, RESHARD_TO_PARTS
from shardproof.testing.casts import run_and_replica, step_and_check
from shardproof.testing.compare import (
    StepPicture,
    backward_of_copies,
    check_bits,
    check_exact,
    check_gradients,
    check_parameters,
    each_once,
    step_label,
    tensors_of,
)
from shardproof.testing.make import (
    Accumulation,
    Adapter,
    Delay,
    OptimizerFactory,
    Precision,
    Settings,
    pair_by_units,
    run_and_plain,
    sharded,
    tower,
)
from shardproof.testing.measure import Collective, occupy
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import (
    after_microbatches,
    batches,
    checked_steps,
    optim,
    parallel,
    shapes,
    tokens,
    train_and_check,
)

pytestmark = world(2)


def chain(function: Callable[[torch.Tensor], torch.Tensor]) -> type[nn.ModuleList]:
    """Define a list with a forward of its own, which runs its modules one after the other, each before ``function``.

    The class has one name whatever the function, as one that is defined again in a notebook has.
    """

    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = function(module(x))
            return x

    return Chain


class Scaled(nn.Module):
    """A module times a parameter of its own, with the attributes of that module, as many wrappers have."""

    def __init__(self, inner: nn.Module, dim: int) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.rand(dim))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)  # type: ignore[no-any-return]


class TwoCalls(nn.Module):
    """Calls ``inner``, a Linear(dim, dim), twice on the input, adds both results, and calls ``outer``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, dim + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.inner(x)) + self.inner(x).square())
        return out


class ThreeInputs(nn.Module):
    """The first of three tensors, in any containers, plus the second times the third; they were on ``devices``."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[torch.device] = []

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        first, second, third = tensors_of((args, keywords))
        self.devices.extend(tensor.device for tensor in (first, second, third))
        return first + second * third


@contract("TRAINING-1")
@world(2, 4, 8)
@pytest.mark.parametrize(
    "shapes",
    [((16, 15), (15, 8)), ((7, 15), (15, 3)), ((16, 17), (17, 8))],
    ids=["16x15-15x8", "7x15-15x3", "16x17-17x8"],
)
def test_single_unit(rank: Rank, shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """One unit with uneven sizes, some smaller than the world, trains as DDP does."""
    pair = rank.pair(models.two_linear(*shapes))
    train_and_check(pair, batches(rank, 3, (4, shapes[0][0])), set_to_none="even")


@contract("TRAINING-1")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_many_shapes(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Parameters of one to four dimensions, of one element and few rows, in lists and next to buffers, train."""
    pair = rank.pair(shapes.ManyShapes(), units=[["body"]], reshard_after_forward=reshard_after_forward)
    train_and_check(pair, batches(rank, 3, (2, 3, 6, 6)))


@contract("TRAINING-1")
@FLAT
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_recurrent_module(rank: Rank, reshard_after_forward: bool | None, flat: bool) -> None:
    """A module that also keeps its parameters in a list of its own, as recurrent ones do, trains."""
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, "flat_parameters": flat}
    pair = rank.pair(shapes.Recurrent(dim=5), units=[["body"]], **options)
    train_and_check(pair, batches(rank, 3, (2, 3, 5)))


@contract("TRAINING-1")
@needs(Capability.POST_ACCUMULATE_GRAD_HOOK)  # without it, a rank that holds no element of a parameter has no gradient
def test_parameter_without_rows(rank: Rank) -> None:
    """A parameter whose first dimension is zero trains next to others, and has an empty gradient."""
    pair = rank.pair(shapes.ManyShapes(has_empty=True), units=[["body"]])
    train_and_check(pair, batches(rank, 3, (2, 3, 6, 6)))


@contract("TRAINING-1")
def test_list_that_computes(rank: Rank) -> None:
    """Lists of modules that have a forward of their own are units as any others, also of two classes of one name.

    So is a wrapper with its module's attributes. Modules without parameters, new or copied, can be added between steps.
    """
    lists = [chain(function)([nn.Linear(9, 9), nn.Linear(9, 9)]) for function in (torch.tanh, torch.sin)]
    scaled = Scaled(nn.Sequential(nn.Linear(9, 9), nn.Identity()), 9)
    pair = rank.pair(nn.Sequential(nn.Linear(5, 9), *lists, scaled, nn.Linear(9, 5)), units=[["1"], ["2"], ["3"]])
    for _ in checked_steps(pair, batches(rank, 2, (4, 5))):
        inner: Any = pair.sharded.original_module("3.inner")
        inner.extend([copy.deepcopy(inner[1]), nn.Identity()])


@contract("TRAINING-2")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("delays", DELAYED)
@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=needs(Capability.TIED_PARAMETERS))])
def test_many_units(
    rank: Rank, is_tied: bool, delays: tuple[str, ...], reshard_after_forward: bool | int | None
) -> None:
    """A transformer of several units trains as DDP does, also when streams run at other speeds."""
    config = models.TransformerConfig(layers=3, vocabulary=61, length=16, heads=4, is_tied=is_tied)
    chosen = [DELAYS[name] for name in delays]
    pair = pair_by_units(rank, models.Transformer(config), delays=chosen, reshard_after_forward=reshard_after_forward)
    # Made in advance, and compared at the end: copies to the device and from it would wait for the step before.
    batches = [rank.tokens(step, (3, config.length), vocabulary=config.vocabulary) for step in range(3)]
    for step, batch in enumerate(batches):
        pair.step(batch, set_to_none=step % 2 == 0)
    pair.check()


@contract("TRAINING-2")
@world(8)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_TO_PARTS)
def test_many_units_on_eight_ranks(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A transformer trains as DDP does on eight ranks, where groups of two and of four are both less than all."""
    model = models.Transformer()
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    train_and_check(pair, tokens(rank, 3, (3, model.config.length), vocabulary=model.config.vocabulary))


@contract("TRAINING-3")
@world(2, 4)
@needs(Capability.NON_ROOT_FORWARD)
@pytest.mark.parametrize(
    "delays", [pytest.param((), id="undelayed"), pytest.param(("before-step",), marks=needs(Hardware.STREAMS))]
)
def test_unit_called_directly(rank: Rank, delays: tuple[str, ...]) -> None:
    """Training one unit by calling it alone reduces its gradients; the other units get none.

    Steps follow each other without the host waiting, so that a unit which does not wait for the step reads too early.
    """
    model, chosen = models.Tower(dim=33), [DELAYS[name] for name in delays]
    pair = rank.pair(model, units=model.units(), baseline="replicated", find_unused_parameters=True, delays=chosen)
    order = ["", "layers.0", "layers.0", "", "layers.0"]
    batches = [rank.batch(step, (8, 33)) for step in range(len(order))]
    for batch, submodule in zip(batches, order, strict=True):
        pair.step(batch, submodule=submodule)
    pair.check()


@contract("TRAINING-3")
@needs(Capability.NON_ROOT_FORWARD)
def test_unit_called_before_the_root(rank: Rank) -> None:
    """A root whose unit was called first trains as DDP does, or refuses its forward on every rank."""
    run, plain = run_and_plain(rank, models.Tower(dim=9))
    batch = rank.batch(0, (4, 9))
    run.forward_backward((batch,), loss=models.mean_square, submodule="layers.0")
    run.adapter.zero_grad(set_to_none=True)
    refusal = Refusal(rank, lambda: run.adapter.forward(batch))
    if refusal.text is not None:
        return
    run.adapter.backward(models.mean_square(refusal.result))
    backward_of_copies(rank, plain, loss=models.mean_square(plain(batch)))
    check_gradients(run, plain, step=0)


@contract("TRAINING-3")
@needs(Capability.NON_ROOT_FORWARD, Capability.GROUPED_UNIT, Capability.REGISTERED_STATE)
def test_module_of_several_called_before_the_root(rank: Rank) -> None:
    """One module of a unit of several, called before the root, is refused, or is trained and freed again."""
    model = models.Tower(dim=9)
    whole = models.copy_of(model).to(rank.device)
    run = rank.run(model, units=[["layers.0", "layers.1"], ["layers.2"]])
    batch = rank.batch(0, (4, 9))
    refusal = Refusal(rank, lambda: run.adapter.forward(batch, submodule="layers.0"))
    submodule = "" if refusal.text is not None else "layers.0"
    output = run.adapter.forward(batch) if submodule == "" else refusal.result
    run.adapter.backward(models.mean_square(output))
    backward_of_copies(rank, whole, loss=models.mean_square(whole.get_submodule(submodule)(batch)))
    reached = [name for name, one in run.adapter.gradients().items() if one is not None]
    missing = {name for name, value in whole.named_parameters() if value.grad is not None}.difference(reached)
    assert not missing, f"after a forward of {submodule or 'the root'} there is no gradient of {', '.join(missing)}"
    check_gradients(run, whole, step=0)
    gathered = [name for name, is_gathered in run.adapter.gathered().items() if is_gathered]
    assert not gathered, f"after backward these are gathered: {', '.join(gathered)}"


@contract("TRAINING-3")
@needs(Capability.NON_ROOT_FORWARD)
def test_slice_of_a_sequence(rank: Rank) -> None:
    """A slice of a sharded ``Sequential`` computes with its modules, as a slice of the unsharded one does."""
    model = nn.Sequential(*(models.MLP(5) for _ in range(3)))
    plain: Any = models.copy_of(model).to(rank.device)
    run = rank.run(model, units=[["0"], ["1"], ["2"]])
    whole: Any = run.original_module("")
    batch = rank.batch(0, (4, 5))
    for _ in range(2):
        with torch.no_grad():
            run.adapter.forward(batch)
            found, expected = whole[1:].to(rank.device)(batch), plain[1:](batch)
        assert torch.equal(found, expected), "the slice has another output than that of the unsharded model"


@contract("TRAINING-4")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("model", [models.ReusedInner, TwoCalls], ids=["chained", "on-one-input"])
def test_unit_called_twice(
    rank: Rank, model: Callable[[int], nn.Module], reshard_after_forward: bool | int | None
) -> None:
    """A unit that runs twice in a forward, in a chain or on one input, is reduced with both contributions."""
    pair = rank.pair(model(5), units=[["inner"]], reshard_after_forward=reshard_after_forward)
    train_and_check(pair, batches(rank, 3, (32, 5)), set_to_none="even")


#: What an engine has as well whose whole model is in bfloat16.
BRAIN = Precision(param_dtype=torch.bfloat16, cast_forward_inputs=False)
WIDER = dataclasses.replace(BRAIN, reduce_dtype=torch.float32)


@contract("TRAINING-4")
@needs(Capability.MODEL_PRECISION)
@pytest.mark.parametrize("model", [models.ReusedInner, TwoCalls], ids=["chained", "on-one-input"])
@pytest.mark.parametrize(
    ("precision", "microbatches"),
    [
        pytest.param(BRAIN, 1, id="bf16"),
        # float32 sums these gradients exactly, whether they are reduced before they are added up or after.
        *(pytest.param(WIDER, n, marks=needs(Capability.ACCUMULATION_DTYPES), id=f"bf16-fp32-{n}") for n in (1, 2)),
    ],
)
def test_unit_called_twice_in_bfloat16(
    rank: Rank, precision: Precision, microbatches: int, model: Callable[[int], nn.Module]
) -> None:
    """A unit that runs twice in a forward in bfloat16 is reduced with both contributions and updated in float32."""
    # An engine's float32 copies begin with the values of bfloat16.
    options: Any = {"units": [["inner"]], "precision": precision, "microbatches": microbatches}
    run, replica = run_and_replica(rank, model(5).bfloat16().float(), optimizer=optim.sgd(), **options)
    for step, batch in enumerate(batches(rank, 3, (32, 5), microbatches=microbatches)):
        step_and_check(rank, run, replica, [(one.bfloat16(),) for one in batch], number=step, loss=models.mean_square)


@contract("TRAINING-4")
@pytest.mark.parametrize(
    "precision", [Precision(), pytest.param(BRAIN, marks=needs(Capability.MODEL_PRECISION))], ids=["fp32", "bf16"]
)
def test_root_called_on_its_output(rank: Rank, precision: Precision) -> None:
    """A root that the loss calls again on its output is reduced with both contributions, in each microbatch."""
    run = rank.run(parallel.Factors(4), microbatches=2, precision=precision, optimizer=optim.sgd())
    # Of small integers every sum and product is exact, in any order and dtype.
    given = [(4 * rank.batch(0, (3, 4), microbatch=number)).round() for number in range(2)]
    inputs = [(one.to(precision.param_dtype or one.dtype),) for one in given]
    step = run.step(inputs, loss=lambda output: run.adapter.forward(output).float().sum())
    # The parameter is 1, so that each of its uses contributes the input.
    everyone = rank.exchange_tensors([2 * torch.cat(given).sum(0)])
    expected = torch.stack([sums[0] for sums in everyone]).mean(0)
    piece = run.settle(step).gradients["weight"]
    assert piece is not None, "there is no gradient"
    check_bits("gradient of 'weight'", piece.tensor, piece.cut(expected.cpu()), sides="value and both contributions")


@contract("TRAINING-5")
@needs(Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize("swaps", [False, True], ids=["sets-data", "swaps-tensors"])
def test_cast_after_sharding(rank: Rank, swaps: bool) -> None:
    """A model cast to float64 after sharding trains in float64: parameters, gradients and losses.

    torch casts by setting the parameters' data or, as it announces for the future, by swapping tensors.
    """
    rank.monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swaps)
    options: Any = {"units": [["in_proj"], ["out_proj"]], "baseline": "replicated", "cast": torch.float64}
    drawn = [batch.double() for batch in batches(rank, 3, (2, 5))]
    train_and_check(rank.pair(models.MLP(5), **options), drawn, set_to_none="even")
    if Capability.ADAM in rank.implementation.capabilities():
        pair = rank.pair(models.MLP(5), optimizer=optim.adam(kernels="foreach"), **options)
        train_and_check(pair, drawn[:1])


@contract("TRAINING-5")
@needs(Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize(
    ("reshard_after_forward", "shards"),
    [
        *(pytest.param(*item.values, True, marks=item.marks) for item in RESHARD[:3]),
        pytest.param(None, False, marks=needs(Capability.NO_SHARD), id="replicas-alone"),
    ],
)
def test_cast_after_an_evaluation(rank: Rank, reshard_after_forward: bool | None, shards: bool) -> None:
    """A model that is gathered by an evaluation, cast to bfloat16, evaluated and cast back has rounded values."""
    model = models.Tower(dim=9)
    rounded = models.copy_of(model).to(rank.device).to(torch.bfloat16)
    options: Any = {"reshard_after_forward": reshard_after_forward, "optimizer": optim.sgd(), "shards": shards}
    run, batch = rank.run(model, units=model.units(), **options), rank.batch(0, (4, 9))
    run.evaluate((batch,))
    run.adapter.module.to(torch.bfloat16)
    (output,) = run.evaluate((batch.to(torch.bfloat16),))
    assert torch.equal(output, rounded(batch.to(torch.bfloat16))), "the cast model has another output than unsharded"
    run.adapter.module.to(torch.float32)
    twin = rank.run(rounded.to(torch.float32), units=model.units(), **options)
    for step in range(2):
        pictures = (one.step([(batch,)], loss=models.mean_square) for one in (run, twin))
        check_exact(rank, *pictures, step=step, why="the same values")


@contract("TRAINING-5")
@needs(Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize("when", ["before-the-step", pytest.param("after-new-data", marks=needs("flat_parameters"))])
def test_cast_there_and_back(rank: Rank, when: str) -> None:
    """A cast to float64 and back loses neither gradients nor values that user code has set before."""
    model = models.Tower(dim=9)

    def turn(adapter: Adapter, *, now: bool) -> None:
        if now:
            adapter.module.double().float()

    def train(casts: bool) -> StepPicture:
        run = rank.run(
            models.copy_of(model), units=model.units(), optimizer=optim.sgd(),
            after_backward=lambda adapter: turn(adapter, now=casts and when == "before-the-step"),
        )  # fmt: skip
        run.step([(rank.batch(0, (4, 9)),)], loss=models.mean_square)
        if when == "after-new-data":
            for parameter in each_once(run.adapter.named_parameters()).values():
                parameter.data = parameter.data * 0.5
            turn(run.adapter, now=casts)
        return run.step([(rank.batch(1, (4, 9)),)], loss=models.mean_square)

    check_exact(rank, train(True), train(False), step=1, why="the same values and gradients")


@contract("TRAINING-5")
@needs(Capability.CAST_AFTER_INIT, Capability.DEFERRED_REDUCTION)
@FLAT
def test_cast_between_microbatches(rank: Rank, flat: bool) -> None:
    """A cast to float64 and back between two microbatches does not lose gradients that are not reduced yet."""
    pair = tower(rank, microbatches=2, accumulation=Accumulation(), flat_parameters=flat)
    after_microbatches(rank, pair, lambda: pair.adapter.module.double().float())
    train_and_check(pair, batches(rank, 2, (4, 9), microbatches=2))


@contract("TRAINING-11")
@world(2, 4)
@needs(Capability.OWN_OPTIMIZER)
@pytest.mark.parametrize("how", ["in-place", pytest.param("data", marks=needs("flat_parameters"))])
def test_parameters_that_a_script_changes(rank: Rank, how: str) -> None:
    """The next step uses the values that user code writes to parameters between two steps, in place or as new data."""
    pair = tower(rank)
    everyone = [pair.adapter, pair.baseline.adapter]
    for step in range(3):
        named = [*(each_once(one.named_parameters()) for one in everyone), dict(pair.oracle.model.named_parameters())]
        with torch.no_grad():
            for parameter in itertools.chain.from_iterable(one.values() for one in named):
                if how == "data":
                    parameter.data = parameter.data * 0.5
                else:
                    parameter.mul_(0.5)
        pair.checked_step(rank.batch(step, (4, 9)))


@contract("TRAINING-11")
@world(2, 4)
@needs(Capability.MANUAL_RESHARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_parameters_that_a_script_changes_before_backward(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Backward uses what user code has written to the shards since the forward, once it has resharded the units."""
    # Of small integers, so that sums have the same bits in any order.
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    for parameter in plain.parameters():
        parameter.data = (torch.arange(parameter.numel()) % 5 - 2.0).view_as(parameter)
    run = rank.run(copy.deepcopy(plain), units=[["0"], ["1"]], reshard_after_forward=reshard_after_forward)
    plain.to(rank.device)
    batch = ((torch.arange(24.0) + rank.index) % 7 - 3).view(4, 6).to(rank.device)
    for step in range(2):
        loss, expected_loss = (one(batch).sum() for one in (run.adapter.forward, plain))
        run.adapter.reshard()
        if rank.device.type != "cpu":
            occupy(4 * DELAY_MS, device_type=rank.device.type)  # the values are written late: gathers have to wait
        with torch.no_grad():
            for parameter in run.adapter.held_parameters().values():
                parameter.mul_(0.5)
        for parameter in plain.parameters():
            parameter.data.mul_(0.5)  # which autograd does not refuse
        run.adapter.backward(loss)
        expected_loss.backward()
        for name, piece in run.adapter.gradients().items():
            gradient = plain.get_parameter(name).grad
            assert gradient is not None and piece is not None, f"{name} has no gradient"
            dist.all_reduce(gradient)
            expected = piece.cut(gradient / rank.world_size)
            check_bits(f"gradient of {name!r} in {step_label(step)}", piece.tensor, expected)
        run.adapter.zero_grad(set_to_none=True)
        plain.zero_grad()


@contract("TRAINING-12")
@needs(Capability.SHARDED)
@each_value("other")
@pytest.mark.parametrize(
    "other",
    [
        pytest.param("placement", marks=needs(Capability.DTENSOR_PARAMETERS)),
        # Where forward gathers the registered parameters as they are, the module itself refuses the size.
        pytest.param("size", marks=needs(Capability.DTENSOR_PARAMETERS, Capability.REGISTERED_STATE)),
        pytest.param("flat-size", marks=needs("flat_parameters")),
    ],
)
def test_parameter_of_another_layout(rank: Rank, other: str) -> None:
    """A replacement of another size or placement for a parameter is refused by name, or used."""
    model = models.Tower(dim=9)
    plain = models.copy_of(model).to(rank.device)
    zeros = plain.get_parameter("layers.1.in_proj.weight").data.zero_()
    run, batch = rank.run(model, units=model.units(), flat_parameters=other == "flat-size"), (rank.batch(0, (4, 9)),)
    run.evaluate(batch)
    name, held = next(run.adapter.submodule("layers.1").named_parameters())
    owner, _, last = name.rpartition(".")
    values, placement = (zeros[:-2], Shard(0)) if other == "size" else (zeros, Replicate())
    placed = distribute_tensor(values, rank.mesh(), [placement])
    new = held.detach()[:-1].clone() if other == "flat-size" else placed
    setattr(run.adapter.submodule("layers.1").get_submodule(owner), last, nn.Parameter(new))
    refusal = Refusal(rank, lambda: run.adapter.forward(*batch), may_send=True)  # units before it are gathered
    if refusal.text is not None:
        return refusal.check_names("in_proj.weight", last if other == "flat-size" else name)
    assert torch.equal(refusal.result, plain(*batch)), "the forward uses other values than those of the new parameter"


@contract("TRAINING-6")
@world(2, 4)
@pytest.mark.parametrize("factory", [optim.adam, optim.adamw], ids=["adam", "adamw"])
@pytest.mark.parametrize("kernels", ["for-loop", "foreach", "fused"])
def test_first_step_of_adam(rank: Rank, kernels: optim.Kernels, factory: Callable[..., OptimizerFactory]) -> None:
    """Adam's state starts at step one on every shard: its first update is the baseline's, by any kernels."""
    pair = tower(rank, dim=17, optimizer=factory(kernels=kernels))
    pair.checked_step(rank.batch(0, (8, 17)))


@contract("TRAINING-7")
@world(2, 4)
@needs(Capability.GROUPED_UNIT)
def test_unit_of_several_modules(rank: Rank) -> None:
    """Modules that share a unit train as DDP does."""
    pair = rank.pair(models.Tower(dim=9), units=[["layers.0", "layers.1"], ["layers.2"]])
    train_and_check(pair, batches(rank, 3, (4, 9)))


@contract("TRAINING-7")
@needs(Capability.GROUPED_UNIT, Capability.COUNTED_UNITS, Capability.REGISTERED_STATE)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_unit_of_several_modules_is_gathered_once(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Modules that share a unit are gathered by one collective and reduced by one, of their common size.

    Once the last of them has run they are freed, before the next unit computes.
    """
    pair = rank.pair(
        models.Tower(dim=9), units=[["layers.0", "layers.1"], ["layers.2"]], reshard_after_forward=reshard_after_forward
    )
    shown: list[bool] = []
    pair.adapter.submodule("layers.2").register_forward_pre_hook(
        lambda module, args: shown.append(pair.adapter.gathered()["layers.0.in_proj.weight"])
    )
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        keeps = reshard_after_forward is False
        assert shown.pop() == keeps, f"when layers.2 computes, layers.0 and layers.1 are gathered: {not keeps}"
        pair.check()
        gathered = [item.unit for item in pair.last_trace() if item.phase == "forward"]
        assert gathered == ["(root)", "layers.0,layers.1", "layers.2"], f"forward gathers {gathered}"
        in_backward = 2 if reshard_after_forward is None else 3 * bool(reshard_after_forward)
        pair.check_counts("backward", all_gather=in_backward, reduce_scatter=3)
        pair.check_bytes()


@contract("TRAINING-7")
@needs(Capability.GROUPED_UNIT, Capability.COUNTED_UNITS, Capability.UNUSED_MODULE)
def test_member_that_does_not_run(rank: Rank) -> None:
    """A unit of which one module does not run is gathered once, freed after forward, and reduced once."""
    pair = rank.pair(
        shapes.SkippedMember(dim=9), units=[["used", "skipped"]], baseline="replicated", find_unused_parameters=True
    )
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        pair.check_counts("forward", all_gather=2)
        pair.check_counts("backward", all_gather=1, reduce_scatter=2)


@contract("TRAINING-7")
@needs(Capability.GROUPED_UNIT, Capability.NON_ROOT_FORWARD, Capability.AUTOGRAD_CALLS, Capability.INPUTS_TO_DEVICE)
def test_chunks_of_a_head(rank: Rank) -> None:
    """A head in a shared unit, which the loss calls for chunks of the output, each with a backward, trains."""
    model = Headless(9)
    plain = models.copy_of(model).to(rank.device)
    run = rank.run(model, units=[["layer"], ["norm", "head"]], optimizer=optim.sgd())
    optimizer = optim.sgd()(plain.parameters())
    for step in range(2):
        batch = rank.batch(step, (4, 9))

        def losses(forward: Any, head: Any, batch: torch.Tensor = batch) -> Iterator[torch.Tensor]:
            hidden = forward(batch)
            cut = hidden.detach().requires_grad_()
            for chunk in cut.chunk(2):
                yield models.mean_square(head(chunk))
            yield (hidden * cut.grad).sum()

        with run.recorder.during("backward"):
            # In each step the root moves its input to the device.
            for loss in losses(run.adapter.forward, run.adapter.submodule("head"), batch.cpu()):
                loss.backward()
        for loss in losses(plain, plain.head):
            backward_of_copies(rank, plain, loss=loss)
        check_gradients(run, plain, step=step)
        run.adapter.step()
        optimizer.step()
        check_parameters(run, plain, step=step)
        run.adapter.zero_grad(set_to_none=True)
        optimizer.zero_grad()


class Headless(nn.Module):
    """A layer and a norm; the head is left to the loss."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer, self.norm, self.head = models.MLP(dim), nn.LayerNorm(dim), nn.Linear(dim, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.layer(batch))
        return output


@contract("TRAINING-8")
@world(2, 4)
@needs(Capability.FORWARD_METHOD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_other_forward_methods(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A registered method, called by a parent instead of forward, gathers and trains as forward does."""
    pair = _with_registered_method(rank, reshard_after_forward)
    train_and_check(pair, batches(rank, 3, (4, 9)))


@contract("TRAINING-8")
@needs(Capability.FORWARD_METHOD)
def test_forward_methods_of_one_class(rank: Rank) -> None:
    """A method may be registered for several units of one class, each by itself, and several for one unit."""
    model = models.TwoEncoders(dim=9)
    pair = rank.pair(model, units=[["first"], ["second"]])
    for name, method in (("first", "features"), ("second", "features"), ("second", "stretched")):
        pair.adapter.register_forward_method(name, method)
    train_and_check(pair, batches(rank, 3, (4, 9)))


@contract("TRAINING-8")
@needs(Capability.FORWARD_METHOD)
def test_forward_method_of_one_module(rank: Rank) -> None:
    """A registered method may be one that user code has set on the module itself, over that of its class."""
    model = models.TwoStage(dim=9)
    doubled = types.MethodType(lambda encoder, x: torch.tanh(encoder.inner(x)) * 2, model.encoder)
    model.encoder.features = doubled  # type: ignore[method-assign]
    pair = rank.pair(model, units=[["encoder"], ["projector"]])
    pair.adapter.register_forward_method("encoder", "features")
    train_and_check(pair, batches(rank, 3, (4, 9)))


@contract("TRAINING-8")
@needs(Capability.FORWARD_METHOD, Capability.REGISTERED_STATE, Capability.COUNTED_UNITS)
@needs(Capability.ROOT_RESHARD, Capability.ALL_GATHER_ORDER)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_other_forward_methods_free(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Once a registered method has returned, its unit is freed or kept as after forward; backward gathers it.

    Its gradients are reduced when backward has passed it, before the input's gradient is known.
    """
    pair = _with_registered_method(rank, reshard_after_forward)
    shown: list[bool] = []
    pair.adapter.submodule("projector").register_forward_pre_hook(
        lambda module, args: shown.append(pair.adapter.gathered()["encoder.inner.weight"])
    )
    keeps = reshard_after_forward is False
    for step in range(2):
        batch = rank.batch(step, (4, 9)).requires_grad_()
        reduced: list[int] = []
        batch.register_hook(functools.partial(_note_reduced, pair, reduced))
        pair.step(batch)
        assert shown.pop() == keeps, f"encoder: gathered is {not keeps} once its registered method has returned"
        assert reduced == [2], f"when the input's gradient is known, the number of reduced units is {reduced[0]} of 2"
        pair.check()
        pair.check_counts("forward", all_gather=2)
        pair.check_counts("backward", all_gather=0 if keeps else 2, reduce_scatter=2)


def _note_reduced(pair: Pair, reduced: list[int], gradient: torch.Tensor) -> None:
    reduced.append(sum(item.kind == "reduce_scatter" for item in pair.last_trace()))


def _with_registered_method(rank: Rank, reshard_after_forward: bool | int | None) -> Pair:
    units = [["encoder"], ["projector"]]
    pair = rank.pair(models.TwoStage(dim=9), units=units, reshard_after_forward=reshard_after_forward)
    pair.adapter.register_forward_method("encoder", "features")
    return pair


@contract("TRAINING-9")
@needs(Capability.INPUTS_TO_DEVICE, Hardware.ACCELERATOR)
@pytest.mark.parametrize("form", ["positional", "tuple", "list", "dict", "nested", "keyword", "keyword-nested"])
def test_inputs_move_to_device(rank: Rank, form: str) -> None:
    """Tensors on the CPU, alone or in containers, by position or by keyword, reach the root's forward on the device."""
    x, y, z = (rank.batch(step, (2, 3)).cpu() for step in range(3))
    forms: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "positional": ((x, y, z), {}),
        "tuple": (((x, y, z),), {}),
        "list": (([x, y, z],), {}),
        "dict": (({"x": x, "y": y, "z": z},), {}),
        "nested": (({"a": [x, (y, None)]}, (1, [z])), {}),
        "keyword": ((x,), {"y": y, "z": z}),
        "keyword-nested": ((), {"pair": {"x": [x], "y": (None, y)}, "z": z}),
    }
    args, keywords = forms[form]
    model = ThreeInputs()
    output = rank.run(model).adapter.submodule("")(*args, **keywords)
    assert model.devices == [rank.device] * 3, f"the inputs are on {model.devices}"
    assert torch.equal(output.cpu(), x + y * z)


@contract("TRAINING-2")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_another_default_device(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A model is sharded, and trains, where it is, whatever device user code has chosen for new tensors meanwhile."""
    train_with_another_default_device(rank, reshard_after_forward=reshard_after_forward)


@contract("TRAINING-2")
@world(4)
@needs(Capability.HYBRID)
def test_another_default_device_of_replicas(rank: Rank) -> None:
    """Replicas on a mesh of the ranks in another order are made, and train, where the model is."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"), order=(3, 1, 2, 0))
    train_with_another_default_device(rank, mesh=mesh)


def train_with_another_default_device(rank: Rank, **options: Any) -> None:
    """Train two copies of a model for two steps, one while new tensors are on the meta device, and compare them."""
    model, x = models.Tower(dim=9).to(rank.device), [rank.batch(step, (4, 9)) for step in range(2)]
    copies = [models.copy_of(model) for _ in range(2)]
    setting = (
        Settings(allocate_memory_from_process_group_for_comm=True)
        if Capability.UNIT_SETTINGS in rank.implementation.capabilities()
        else None
    )
    trained = []
    for one, default in zip(copies, (rank.device, torch.device("meta")), strict=True):
        with default:
            adapter = sharded(rank, one, optimizer=optim.sgd(), units=model.units(), **options)
            if setting is not None:
                adapter.change(setting, unit="layers.0")
            for batch in x:
                adapter.backward(models.mean_square(adapter.forward(batch)))
                adapter.step()
                adapter.zero_grad(set_to_none=False)
        trained.append(adapter.parameters())
    for name, piece in trained[0].items():
        check_bits(f"{name} after two steps", trained[1][name].tensor, piece.tensor)


@contract("TRAINING-9")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_root_without_inputs(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A root whose forward takes nothing trains as any other."""
    pair = rank.pair(models.NoInputs(dim=5), baseline="replicated", reshard_after_forward=reshard_after_forward)
    for _ in range(3):
        pair.checked_step(())


@contract("TRAINING-10")
@world(2, 4)
@needs(Capability.POST_OPTIM_EVENT, Hardware.STREAMS)
@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=needs(Capability.TIED_PARAMETERS))])
def test_gathers_wait_for_the_step(rank: Rank, is_tied: bool) -> None:
    """Gathers that wait for an event after the optimizer's step, instead of its stream, still see the new values."""
    pair = _with_event_after_step(rank, [DELAYS["before-step"]], is_tied=is_tied)
    for batch in list(tokens(rank, 3, (2, 8), vocabulary=11)):
        pair.step(batch)  # not checked at once, which would wait for the step before the next one gathers
    pair.check()


@contract("TRAINING-10")
@needs(Capability.POST_OPTIM_EVENT, Capability.SHARDED, Hardware.STREAMS)
def test_gathers_wait_only_for_the_event(rank: Rank) -> None:
    """The first gather after the step begins while work that follows the event still occupies the step's stream."""
    behind = Delay(milliseconds=20 * DELAY_MS, at="step", when="after")  # a busy host took 160 ms to the gather
    pair = _with_event_after_step(rank, [behind], is_tied=False)
    streams = torch.get_device_module(rank.device)
    begun: list[torch.Event] = []
    issue = pair.sharded.recorder.before

    def note(collective: Collective) -> None:
        if not begun and collective.kind == "all_gather":
            begun.append(streams.Event(enable_timing=True))
            begun[0].record()  # on the stream that gathers
        issue(collective)

    first, second, third = tokens(rank, 3, (2, 8), vocabulary=11)
    pair.step(first)
    pair.step(second)
    behind_is_done = streams.Event(enable_timing=True)
    behind_is_done.record()
    pair.sharded.recorder.before = note
    pair.checked_step(third)
    streams.synchronize()
    early = begun[0].elapsed_time(behind_is_done)
    assert early > DELAY_MS, f"the gather begins {early:.1f} ms before the work behind the event ends: it waited for it"


def _with_event_after_step(rank: Rank, delays: Sequence[Delay], *, is_tied: bool) -> Pair:
    """A pair that records an event after each optimizer's step and passes it on."""
    pair = pair_by_units(rank, models.Transformer(models.TransformerConfig(is_tied=is_tied)), delays=delays)
    optimizer = pair.adapter.optimizer
    assert optimizer is not None
    streams = torch.get_device_module(rank.device)
    optimizer.register_step_post_hook(lambda *_: pair.adapter.after_step(streams.current_stream().record_event()))
    return pair
