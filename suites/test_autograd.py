"""Chapter AUTOGRAD: backward through whatever a forward returned, used or not."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from shardproof.testing import Capability, Pair, Rank, Run, contract, models, needs, world
from shardproof.testing.axes import RESHARD, subjects
from shardproof.testing.compare import (
    backward_of_copies,
    check_bits,
    check_exact,
    check_gradients,
    check_parameters,
    distance,
    each_once,
    local_of,
    step_label,
    tensors_of,
)
from shardproof.testing.make import Accumulation, Adapter, pair_by_units, run_and_plain, tower
from shardproof.testing.measure import Census
from shardproof.testing.refuse import error_of_all
from shardproof.testing.train import batches, optim, recompute, shapes, train_and_check

pytestmark = world(2)

DATACLASS, LATE = (
    pytest.param(name, marks=needs(Capability.DATACLASS_OUTPUT)) for name in ("dataclass", "late-dataclass")
)
WHY = "the same kernels on the same shards, in another order of parameters"
CLASSES = ["ordered-dict", "list-class", "tuple-class", "frozen-dataclass", "late-dataclass", "dict-dataclass"]
NESTINGS = ["tuple", "list", "dict", "ordered-dict", "namedtuple", "nested", "deep", DATACLASS, LATE]


class NamedTriple(NamedTuple):
    """Three trained tensors."""

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor


@dataclasses.dataclass
class RecordOfThree:
    """Three trained tensors, with values of other kinds between them."""

    first: torch.Tensor
    nothing: None
    second: torch.Tensor
    count: int
    third: torch.Tensor


@dataclasses.dataclass
class LateRecord:
    """Three trained tensors, of which the constructor takes none but the first; the others are set later."""

    first: torch.Tensor
    second: torch.Tensor = dataclasses.field(init=False)
    third: torch.Tensor = dataclasses.field(init=False)


class ThreeOutputs(nn.Module):
    """Linear(dim, dim), then a unit ``branches`` that returns three tensors in a container; see :func:`pack_three`.

    Each of the three depends on every parameter of the model, so that a loss of any one of them trains all.
    """

    def __init__(self, dim: int, nesting: str) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.branches = _Three(dim, nesting)

    def forward(self, x: torch.Tensor) -> Any:
        packed: Any = self.branches(torch.tanh(self.entry(x)))
        if isinstance(packed, LateRecord):
            return packed.first, packed.second, packed.third
        return packed


class _Three(nn.Module):
    def __init__(self, dim: int, nesting: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.nesting = nesting

    def forward(self, x: torch.Tensor) -> Any:
        a, b, c = (torch.tanh(layer(x)) for layer in self.layers)
        return pack_three(a * b + c, a + b * c, torch.tanh(a - b - c), self.nesting)


def pack_three(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, nesting: str) -> Any:
    """Put three tensors into a container, in this order; "nested" has several kinds, "deep" is a hundred lists deep."""
    record = LateRecord(first)
    record.second, record.third = second, third
    deep: list[Any] = [third]
    for _ in range(98):
        deep = [deep]
    packed: dict[str, Any] = {
        "tuple": (first, second, third),
        "list": [first, second, third],
        "dict": {"first": first, "constant": torch.zeros(2), "second": second, "third": third},
        "ordered-dict": collections.OrderedDict(first=first, second=second, third=third),
        "namedtuple": NamedTriple(first, second, third),
        "dataclass": RecordOfThree(first, None, second, 3, third),
        "late-dataclass": record,
        "nested": {"a": [first, None, (second,)], "b": (7, {"c": [[third]]})},
        "deep": [first, second, deep],
    }
    return packed[nesting]


class InPlaceStack(models.Stacked):
    """Units ``layers.N`` whose output, a view of what they computed, is changed in place by their caller.

    The view is of rows or, where the width of a unit is even, of every other column. Input and output: (batch, dim).
    """

    def __init__(self, dim: int, depth: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(_ReturnsView(dim, dim + index) for index in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            out = layer(x)
            out += x
            x = out
        return x


class _ReturnsView(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(dim, width), nn.Linear(width, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = self.back(torch.tanh(self.into(x)))
        if self.into.out_features % 2 == 0:
            return both[:, ::2]
        return both.view(2 * x.shape[0], x.shape[1])[: x.shape[0]]


class Forces(nn.Module):
    """Adds to the output of a unit ``energy`` a gradient of it that forward computes itself, as models of forces do.

    Input and output: (batch, dim). The gradient of the input within forward is a constant for backward.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.energy, self.out = models.MLP(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(place).square().sum(), place)
        out: torch.Tensor = self.out(self.energy(x) + force)
        return out


class ForcesOfUnit(nn.Module):
    """As :class:`Forces`, but the unit ``energy`` computes the gradient of its input itself, without autograd too.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.energy, self.out = _Energy(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy, force = self.energy(x, x.detach().requires_grad_())
        out: torch.Tensor = self.out(energy + force)
        return out


class _Energy(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = models.MLP(dim)

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.inner(place).square().sum(), place)
        return self.inner(x), force


@contract("AUTOGRAD-1")
@world(2, 4)
@needs(Capability.UNUSED_OUTPUT)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_unused_output_keeps_other_gradients(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A forward output that the loss ignores must not stop the other gradients.

    Gradients are zeroed after even steps and set to None after odd ones: the unused head then has a
    zero gradient with momentum to move it, or no gradient and does not move, as in the baseline.
    """
    pair = _pair_with_unused(rank, models.TwoHeads(dim=25), [["head0"]], reshard_after_forward)
    for step in range(6):
        loss = models.both_heads if step < 3 else models.first_head
        pair.checked_step(rank.batch(step, (2, 25)), loss=loss, set_to_none=step % 2 == 1)


def _pair_with_unused(rank: Rank, model: nn.Module, units: list[list[str]], reshards: Any) -> Pair:
    """A pair that need not use all outputs or modules, and has nothing gathered after a backward."""
    options: Any = {
        "baseline": "replicated",
        "find_unused_parameters": True,
        "after_backward": _assert_nothing_gathered,
    }
    return rank.pair(model, units=units, reshard_after_forward=reshards, **options)


@contract("AUTOGRAD-2")
@world(2, 4)
@needs(Capability.UNUSED_MODULE)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_unused_module_gets_no_gradient(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A unit that never ran has no gradient and does not move; the others train, with gradients zeroed too."""
    pair = _pair_with_unused(rank, models.SkippedModule(dim=25), [["head0"], ["head1"]], reshard_after_forward)
    train_and_check(pair, batches(rank, 3, (2, 25)), set_to_none="odd")


@contract("AUTOGRAD-3")
@world(2, 4)
@subjects("container", ["list", "namedtuple", "tuple", "dict", DATACLASS])
def test_containers_between_units(rank: Rank, container: models.Container) -> None:
    """Hooks find the tensors in any container that passes between units, and keep its type."""
    model = models.packed_stack(dim=25, container=container, depth=3)
    pair = rank.pair(model, units=[[str(index)] for index in range(5)])
    train_and_check(pair, batches(rank, 3, (2, 25)), set_to_none="odd")


@contract("AUTOGRAD-3")
@needs(Capability.CONTAINER_OUTPUT, Capability.DATACLASS_OUTPUT)
@subjects("container", CLASSES)
def test_classes_of_containers(rank: Rank, container: models.Container) -> None:
    """Hooks find the tensors in subclasses of containers, and in a class that is a dict and a dataclass in one."""
    pair = rank.pair(models.packed_stack(dim=9, container=container), units=[["1"], ["2"], ["3"]])
    train_and_check(pair, batches(rank, 2, (2, 9)))


@contract("AUTOGRAD-16")
@needs(Capability.CONTAINER_OUTPUT)
@subjects("container", ["list", "dict", DATACLASS])
def test_containers_that_a_script_passes(rank: Rank, container: models.Container) -> None:
    """A container passed to a unit contains the same tensors afterwards, and can be passed to another unit."""
    pair = rank.pair(shapes.Lending(9, container), units=[["layers.0"], ["layers.1"]])
    train_and_check(pair, batches(rank, 2, (2, 9)))


@contract("AUTOGRAD-4")
@needs(Capability.POST_ACCUMULATE_GRAD_HOOK)
def test_post_accumulate_hook_runs_once(rank: Rank) -> None:
    """Two hooks on each parameter run once in a backward, and see the ranks' average gradient.

    The first hook's gradient must be, bit for bit, that of the optimizer's step: the pair compares the same tensor.
    """
    # The root's parameters have one row, on the first rank; the hooks on them run on all.
    model = torch.nn.Sequential(models.MLP(9), torch.nn.Linear(9, 1))
    pair = rank.pair(model, units=[["0.in_proj"], ["0.out_proj"]])
    named = pair.adapter.named_parameters()
    seen: dict[str, torch.Tensor] = {}
    again: list[str] = []

    def note(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, f"the hook of {name!r} ran before there was a gradient"
        assert parameter.grad.shape == parameter.shape, f"the hook of {name!r} saw a gradient of another layout"
        assert name not in seen, f"the hook of {name!r} ran twice in one backward"
        seen[name] = local_of(parameter.grad).clone()
        parameter.mul_(1)  # hooks run without autograd, and may change it in place

    def compare(*_: Any) -> None:
        assert seen.keys() == named.keys(), "each parameter's hook runs once in one backward"
        assert sorted(again) == sorted(named), f"the second hooks on parameters run for {again}"
        again.clear()
        for name, parameter in named.items():
            assert parameter.grad is not None
            check_bits(f"the hook of {name!r} saw another gradient", seen.pop(name), local_of(parameter.grad))

    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: note(name, parameter))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: again.append(name))
    assert pair.adapter.optimizer is not None
    pair.adapter.optimizer.register_step_pre_hook(compare)
    train_and_check(pair, batches(rank, 3, (2, 9)), set_to_none="even")


@contract("AUTOGRAD-5")
@needs(Capability.POST_ACCUMULATE_GRAD_HOOK, Capability.ADAM)
@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=needs(Capability.TIED_PARAMETERS))])
def test_optimizer_in_hook_equals_optimizer_after_backward(rank: Rank, is_tied: bool) -> None:
    """Stepping each parameter, and its learning rate, in its hook trains the same bits as one step after backward."""
    model = models.Transformer(models.TransformerConfig(is_tied=is_tied))
    ordinary = rank.run(models.copy_of(model), units=model.units(), optimizer=optim.adamw())
    assert ordinary.adapter.optimizer is not None
    schedule = _schedule(ordinary.adapter.optimizer)
    hooked = rank.run(models.copy_of(model), units=model.units())
    _step_in_hooks(each_once(hooked.adapter.named_parameters()).values())
    tokens = rank.tokens(0, (2, 8), vocabulary=11)
    for step in range(10):
        pictures = [run.step([(tokens,)], loss=models.mean_square) for run in (ordinary, hooked)]
        schedule.step()
        check_exact(rank, *pictures, step=step, why=WHY)


def _step_in_hooks(parameters: Any) -> None:
    for parameter in parameters:
        optimizer = optim.adamw()([parameter])

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer, schedule: Any = None) -> None:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        parameter.register_post_accumulate_grad_hook(functools.partial(step, schedule=_schedule(optimizer)))


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


@contract("AUTOGRAD-6")
@world(2, 4)
@needs(Capability.UNUSED_OUTPUT, Capability.CONTAINER_OUTPUT)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_loss_of_any_one_output(rank: Rank, nesting: str) -> None:
    """The loss may use any one of a unit's outputs, the last, first or second, wherever it is in a container."""
    pair = rank.pair(ThreeOutputs(dim=9, nesting=nesting), units=[["branches"]])
    for step, used in enumerate([2, 0, 1]):
        pair.checked_step(rank.batch(step, (2, 9)), loss=functools.partial(_loss_of, index=used))


@contract("AUTOGRAD-6")
@needs(Capability.UNUSED_OUTPUT)
@pytest.mark.parametrize("units", [[["head0"]], [["head0"], ["head1"]]], ids=["of-the-root", "of-a-unit"])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_loss_of_the_last_output(rank: Rank, reshard_after_forward: bool | int | None, units: list[list[str]]) -> None:
    """After a step that used both outputs of the root, the loss may use the last one alone.

    Gradients are zeroed: momentum still moves the unit that backward does not reach, so that its values which were
    gathered ahead in vain are outdated. Nothing stays gathered for the optimizer's step.
    """
    pair = _pair_with_unused(rank, models.TwoHeads(dim=9), units, reshard_after_forward)
    for step in range(4):
        loss = functools.partial(_loss_of, index=1) if step else models.both_heads
        pair.checked_step(rank.batch(step, (2, 9)), loss=loss, set_to_none=False)


def _loss_of(output: Any, *, index: int) -> torch.Tensor:
    trained = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    return models.mean_square(trained[index])


@contract("AUTOGRAD-7")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_gradient_of_the_input(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """An input that requires a gradient gets the baseline's own, which is not averaged over the ranks."""
    pair = tower(rank, reshard_after_forward=reshard_after_forward)
    for step in range(3):
        batch = rank.batch(step, (4, 9)).requires_grad_()
        pair.step(batch)
        gradient, batch.grad = batch.grad, None
        pair.check()  # replays the step on the baseline, with the same input
        assert batch.grad is not None
        assert gradient is not None, f"the input has no gradient in {step_label(step)}; the baseline's has one"
        if pair.adapter.traits.sums_over_ranks:
            gradient = gradient * rank.world_size  # exact: two is a power of two
        # The same kernels on parameters that two ranks, whose sums have one order, keep bitwise equal.
        check_bits(f"gradient of the input in {step_label(step)}", gradient, batch.grad, sides="sharded, baseline")


@contract("AUTOGRAD-7")
@world(2, 4)
def test_inputs_by_keyword(rank: Rank) -> None:
    """Units may get their inputs by keyword, in nested containers, next to None and a number, and one tensor twice."""
    pair = pair_by_units(rank, shapes.Keywords(dim=9))
    train_and_check(pair, batches(rank, 3, (4, 9)))


@contract("AUTOGRAD-7")
@needs(Capability.COUNTED_UNITS, Capability.ALL_GATHER_ORDER)
def test_inputs_by_keyword_are_reduced_in_order(rank: Rank) -> None:
    """The gradients of a unit whose inputs came by keyword are reduced before backward reaches the unit after next."""
    pair = pair_by_units(rank, shapes.Keywords(dim=9))
    reduced: list[list[str]] = []

    def note(*_: Any) -> None:
        reduced.append([item.unit for item in pair.last_trace() if item.kind == "reduce_scatter"])

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(note)

    pair.adapter.submodule("layers.0.into").register_forward_hook(hook)
    train_and_check(pair, batches(rank, 1, (4, 9)))
    assert reduced[0] == ["layers.2", "layers.1"], f"before layers.0 has all its gradients, reduced are {reduced[0]}"


@contract("AUTOGRAD-8")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_two_forwards_before_one_backward(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """One backward of the losses of two forwards of the root has the sum of both gradients."""
    pair = tower(rank, baseline="replicated", reshard_after_forward=reshard_after_forward)
    again = torch.linspace(-1, 1, 18, device=rank.device).view(2, 9)

    def loss(output: torch.Tensor, *, runs: Iterator[Run]) -> torch.Tensor:
        is_oracle = output.dtype == torch.float64
        second = pair.oracle.model(again.double()) if is_oracle else next(runs).adapter.forward(again)
        return models.mean_square(output) + models.mean_square(second)

    for step in range(3):
        # The sharded run's step comes first, and the baseline's when the pair is checked.
        runs = iter((pair.sharded, pair.baseline))
        pair.checked_step(rank.batch(step, (4, 9)), loss=functools.partial(loss, runs=runs))


@contract("AUTOGRAD-13")
@world(2, 4)
def test_output_changed_in_place(rank: Rank) -> None:
    """A unit's output may be a view that its caller changes in place, before backward has reached the unit."""
    pair = pair_by_units(rank, InPlaceStack(dim=9))
    train_and_check(pair, batches(rank, 3, (4, 9)))


@contract("AUTOGRAD-14")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_dropped_forward(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A forward whose output is dropped changes neither the next step nor, after it, what is gathered."""
    pair = tower(rank, reshard_after_forward=reshard_after_forward, after_backward=_assert_nothing_gathered)
    for step in range(3):
        with pair.sharded.recorder.during("dropped"):
            pair.adapter.forward(rank.batch(step, (2, 9), microbatch=1))
        pair.checked_step(rank.batch(step, (4, 9)))


@contract("AUTOGRAD-8")
@needs(Capability.AUTOGRAD_CALLS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize("order", ["first-in-first-out", "last-in-first-out", "retained-graph"])
def test_two_backwards(rank: Rank, order: str, reshard_after_forward: bool | None) -> None:
    """The backwards of two forwards in either order, or two of one graph, have the sum of both gradients."""
    options: Any = {"optimizer": optim.sgd(), "reshard_after_forward": reshard_after_forward}
    run, plain = run_and_plain(rank, models.Tower(dim=9), **options)
    optimizer = optim.sgd()(plain.parameters())

    def in_order(losses: list[torch.Tensor]) -> list[torch.Tensor]:
        return {"first-in-first-out": losses, "last-in-first-out": losses[::-1]}.get(order, losses[:1] * 2)

    for step, given in enumerate(batches(rank, 2, (4, 9), microbatches=2)):
        with run.recorder.during("backward"):
            losses = [models.mean_square(run.adapter.forward(batch)) for batch in given]
            for number, loss in enumerate(in_order(losses)):
                loss.backward(retain_graph=number == 0)
        losses = [models.mean_square(plain(batch)) for batch in given]
        for number, loss in enumerate(in_order(losses)):
            backward_of_copies(rank, plain, loss=loss, retain_graph=number == 0)
        check_gradients(run, plain, step=step)
        _assert_nothing_gathered(run.adapter)
        run.adapter.step()
        optimizer.step()
        check_parameters(run, plain, step=step)
        run.adapter.zero_grad(set_to_none=True)
        optimizer.zero_grad()


@contract("AUTOGRAD-9")
@world(4)
@needs(Capability.RANKS_DIFFER)
@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        pytest.param(1, None, id="shards"),
        pytest.param(1, Accumulation(), marks=needs(Capability.DEFERRED_REDUCTION), id="deferred"),
        pytest.param(2, None, marks=needs(Capability.HYBRID), id="replicas"),
        pytest.param(4, None, marks=needs(Capability.HYBRID, Capability.SINGLE_RANK), id="replicas-of-one"),
    ],
)
def test_ranks_use_different_parameters(rank: Rank, replicas: int, how: Accumulation | None) -> None:
    """Ranks that use different parameters of a unit train as one model: those without contribute zeros."""
    mesh = rank.mesh((replicas, 4 // replicas), ("replicate", "shard")) if replicas > 1 else None
    options: Any = {"baseline": "replicated", "find_unused_parameters": True, "ranks_differ": True}
    pair = rank.pair(models.Branches(9, 2), mesh=mesh, microbatches=2, accumulation=how, **options)
    for step, given in enumerate(batches(rank, 3, (2, 9), microbatches=2)):
        # In the third step rank 0 uses one of the two branches alone, and the others use both.
        used = [(rank.index + step) % 2, (rank.index * (step == 2) + rank.index + step) % 2]
        pair.checked_step(list(zip(given, used, strict=True)), set_to_none=step % 2 == 0)


@contract("AUTOGRAD-10")
@world(2, 4)
def test_batches_of_different_sizes(rank: Rank) -> None:
    """Ranks may have batches of different sizes: the gradient is the mean of the ranks' gradients."""
    pair = tower(rank)
    train_and_check(pair, (rank.batch(step, ([1, 3, 2, 5][(rank.index + step) % 4], 9)) for step in range(3)))


@contract("AUTOGRAD-11")
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=needs(Capability.RECOMPUTATION))])
def test_saved_tensors_are_packed(rank: Rank, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """Hooks may replace saved tensors, parameters included, by copies, and get no more elements than unsharded."""
    model = models.Tower(dim=9)
    prepare: Any = functools.partial(recompute, means="call") if recomputes else models.Tower.train
    plain = prepare(models.copy_of(model).to(rank.device))
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward, prepare=prepare)
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.detach().clone()

    counts = []
    for forward in (plain, pair.adapter.forward):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(rank.batch(3, (4, 9)))
        counts.append(sum(packed))
    assert 0 < counts[1] <= counts[0], f"forward saves {counts[1]} elements, and {counts[0]} unsharded"
    for batch in batches(rank, 3, (4, 9)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            pair.step(batch)
        pair.check()


@contract("AUTOGRAD-12")
@needs(Capability.AUTOGRAD_CALLS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_gradient_of_the_input_only(rank: Rank, reshard_after_forward: bool | None) -> None:
    """``torch.autograd.grad`` with respect to the input has the plain gradient, and changes no later step."""
    model = models.Tower(dim=9)
    plain = models.copy_of(model).to(rank.device)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    census = Census(pair.sharded)
    for step in range(3):
        x = rank.batch(step, (4, 9), microbatch=1).requires_grad_()
        with pair.sharded.recorder.during("backward"):
            (found,) = torch.autograd.grad(models.mean_square(pair.adapter.forward(x)), x)
        if step == 0:
            (expected,) = torch.autograd.grad(models.mean_square(plain(x)), x)
            check_bits("gradient of the input", found, expected, sides="sharded, plain")
        with_gradient = [name for name, piece in pair.adapter.gradients().items() if piece is not None]
        assert not with_gradient or step, f"after torch.autograd.grad of the input {with_gradient} have gradients"
        _assert_nothing_gathered(pair.adapter)
        if rank.device.type == "cpu" and Capability.SHARDED in rank.implementation.capabilities():
            assert not census.held(), f"after torch.autograd.grad units are gathered (bytes): {census.held()}"
        pair.checked_step(rank.batch(step, (4, 9)))


@contract("AUTOGRAD-12")
@needs(Capability.AUTOGRAD_CALLS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_gradient_penalty(rank: Rank, reshard_after_forward: bool | None) -> None:
    """A penalty on the gradient of the input trains as plain copies do, or every rank raises; no gradient is wrong."""
    run, plain = run_and_plain(rank, models.Tower(dim=9), reshard_after_forward=reshard_after_forward)
    x = rank.batch(0, (4, 9)).requires_grad_()
    losses = []

    def penalised(output: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss: torch.Tensor = models.mean_square(output) + (gradient.norm(dim=1) - 1).square().mean()
        losses.append(float(loss.detach()))
        return loss

    def attempt() -> None:
        with run.recorder.during("backward"):
            penalised(run.adapter.forward(x)).backward()

    backward_of_copies(rank, plain, loss=penalised(plain(x)))
    error = error_of_all(rank, attempt)
    assert len(losses) == 1 or losses[0] == losses[1], (
        f"the loss is {losses[1]!r}; that of plain copies is {losses[0]!r}"
    )
    if not error:
        check_gradients(run, plain, step=0)


#: How ``torch.func`` and forward-mode autograd differentiate and batch a model, of a batch and a direction.
TRANSFORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "grad": lambda model, x, _: torch.func.grad(lambda one: models.mean_square(model(one)))(x),
    "vjp": lambda model, x, direction: torch.func.vjp(model, x)[1](direction)[0],
    "jvp": lambda model, x, direction: torch.func.jvp(model, (x,), (direction,))[1],
    "jacrev": lambda model, x, _: torch.func.jacrev(model)(x[0]),
    "vmap": lambda model, x, _: torch.func.vmap(model)(x),
    "grads-of-samples": lambda model, x, _: torch.func.vmap(
        torch.func.grad(lambda one: models.mean_square(model(one)))
    )(x),
    "forward-mode": lambda model, x, direction: _tangent(model, x, direction),
}


def _tangent(model: Any, x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x.clone().requires_grad_(), direction))
        tangent: torch.Tensor = forward_ad.unpack_dual(output).tangent
    return tangent


@contract("AUTOGRAD-18")
@needs(Capability.AUTOGRAD_CALLS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@subjects("transform", list(TRANSFORMS))
def test_transforms_of_inputs(rank: Rank, transform: str, reshard_after_forward: bool | None) -> None:
    """Functions of ``torch.func`` and forward-mode autograd, over the inputs, give what they give of a plain model.

    The first forward of the model is one of them, and the model trains afterwards.
    """
    pair = tower(rank, reshard_after_forward=reshard_after_forward)
    plain, apply = models.copy_of(pair.oracle.model).float().to(rank.device), TRANSFORMS[transform]
    given = [rank.batch(0, (4, 9), microbatch=number) for number in (1, 2)]
    exact = apply(models.copy_of(plain).double(), *(one.double() for one in given)).detach()
    for _ in range(2):
        with pair.sharded.recorder.during("forward"):
            found = apply(pair.adapter.forward, *given)
        # Products of batches are rounded by how the weights are aligned, which is the implementation's own choice.
        expected = apply(plain, *given).detach()
        result = distance(found.detach(), expected, exact, magnitude=float(exact.abs().max()))
        off = f"sharded by {result.sharded_ulps:.3g} ulps, plain by {result.baseline_ulps:.3g}"
        assert not result.is_too_far, f"{transform} is off the float64 result: {off}"
    train_and_check(pair, batches(rank, 2, (4, 9)))


@contract("AUTOGRAD-17")
@needs(Capability.AUTOGRAD_CALLS, Capability.MULTIPLE_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@subjects("model", [Forces, ForcesOfUnit], ids=["of-a-unit", "in-a-unit"])
def test_gradients_within_forward(rank: Rank, model: Any, reshard_after_forward: bool | None) -> None:
    """A forward may compute gradients, of a unit's output or inside the unit, and then use the root's weights."""
    pair = rank.pair(model(9), units=[["energy"]], baseline="replicated", reshard_after_forward=reshard_after_forward)
    for step in range(2):
        if model is ForcesOfUnit:
            pair.evaluate(rank.batch(step, (2, 9), microbatch=1))
        pair.checked_step(rank.batch(step, (4, 9)))


@contract("AUTOGRAD-15")
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_hooks_of_a_script(rank: Rank, reshard_after_forward: bool | None) -> None:
    """User hooks on modules, on their backward and on tensors run as often as unsharded, and see full parameters."""
    model = models.Tower(dim=9)
    plain = models.copy_of(model).to(rank.device)
    seen: dict[str, list[str]] = {"sharded": [], "plain": []}
    values = {name: value.detach().clone() for name, value in plain.named_parameters()}

    def watch(owner: str, watched: torch.nn.Module) -> torch.nn.Module:
        for name, module in watched.named_modules():
            note = functools.partial(_note_hook, seen[owner], values, name)
            module.register_forward_pre_hook(lambda m, args, note=note: note("forward-pre", m))
            module.register_forward_hook(lambda m, args, output, note=note: note("forward", m, output))
            module.register_full_backward_pre_hook(lambda m, gradient, note=note: note("backward-pre", m))
            module.register_full_backward_hook(lambda m, inputs, outputs, note=note: note("backward", m))
        return watched

    watch("plain", plain)
    pair = pair_by_units(
        rank, model, reshard_after_forward=reshard_after_forward, prepare=lambda prepared: watch("sharded", prepared)
    )
    for step in range(2):
        batch = rank.batch(step, (4, 9)).requires_grad_()
        pair.step(batch)
        models.mean_square(plain(batch)).backward()
        assert seen["sharded"] == seen["plain"], _first_of_two(seen["sharded"], seen["plain"])
        for owner in seen.values():
            owner.clear()
        values.clear()  # the optimizer has changed the parameters
        pair.check()


def _note_hook(
    seen: list[str], values: dict[str, torch.Tensor], name: str, kind: str, module: torch.nn.Module, output: Any = None
) -> None:
    """Note a call, and check the parameters of a Linear inside a unit that the hook sees.

    In the backward hooks of the unit itself its parameters may be not yet, or no longer, gathered.
    """
    seen.append(f"{kind} of {name or 'the root'}")
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: seen.append(f"tensor hook of {name or 'the root'}"))
    where = f"the hook {kind} of {name or 'the root'}"
    if isinstance(module, models.MLP) and kind in ("forward-pre", "forward"):
        name, module = f"{name}.in_proj", module.in_proj
        where += f", looking at {name},"
    if isinstance(module, torch.nn.Linear) and name.startswith("layers."):
        for key in ("weight", "bias"):
            expected, found = values.get(f"{name}.{key}"), getattr(module, key, None)
            assert isinstance(found, torch.Tensor), f"{where} sees no {key}: it is {type(found).__name__}"
            assert not isinstance(found, DTensor), f"{where} sees a shard of {key}"
            shape = (module.out_features, module.in_features)[: found.ndim]
            assert tuple(found.shape) == shape, f"{where} sees {key} of shape {tuple(found.shape)}"
            same = expected is None or torch.equal(found.detach(), expected)
            assert same, f"{where} sees other values of {key} than those of the model"


def _first_of_two(found: list[str], expected: list[str]) -> str:
    for number, (one, other) in enumerate(itertools.zip_longest(found, expected, fillvalue="nothing")):
        if one != other:
            return f"call {number} of a hook is {one}; without sharding it is {other}"
    return ""


def _assert_nothing_gathered(adapter: Adapter) -> None:
    if Capability.REGISTERED_STATE not in adapter.capabilities():
        return
    gathered = [name for name, is_gathered in adapter.gathered().items() if is_gathered]
    assert not gathered, f"after backward every parameter is sharded, but gathered are {', '.join(gathered)}"
