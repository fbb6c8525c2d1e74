"""Chapter OPTIMIZER: optimizers and training loops work on shards as on full parameters.

Every run is compared bit for bit with full copies: the gradients of the models here depend on no order of sums, and
optimizers compute element by element.
"""

import copy
import functools
import itertools
from collections.abc import Iterable, Sequence, Set
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from shardproof.testing import Capability, Rank, Run, contract, models, needs, world
from shardproof.testing.axes import KEEPS, RESHARD, subjects
from shardproof.testing.casts import CastReplica, check_evaluation, run_and_replica, step_and_check
from shardproof.testing.compare import (
    backward_of_copies,
    check_bits,
    check_exact,
    check_gradients,
    check_parameters,
    each_once,
    full_of,
    in_one_tensor_with,
    local_of,
    step_label,
)
from shardproof.testing.make import Trainee
from shardproof.testing.measure import private
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import mixed, optim, ties

pytestmark = world(2)

SHAPE = (7, 5)
UNITS = (("low",), ("high",))
KERNELS: tuple[optim.Kernels, ...] = ("for-loop", "foreach", "fused")
OWN_OPTIMIZER = needs(Capability.OWN_OPTIMIZER)
FLAT = pytest.mark.parametrize(
    "flat_parameters", [False, pytest.param(True, marks=needs("flat_parameters"))], ids=["original", "flat"]
)


def both(rank: Rank, model: nn.Module | None = None, **options: Any) -> tuple[Run, CastReplica]:
    """A run of a ``Mixed``, by default with SGD, and the full copies that it is compared with (collective)."""
    chosen: dict[str, Any] = {"units": UNITS, "optimizer": optim.sgd()} | options
    return run_and_replica(rank, model or mixed.Mixed(*SHAPE), **chosen)


def replace_parameters(run: Run, *places: str) -> None:
    """Replace the parameters of modules by copies, as user code may."""
    for owner in map(run.original_module, places):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(parameter.detach().clone()))


@contract("OPTIMIZER-29")
@needs("flat_parameters")
def test_optimizer_of_flat_parameters(rank: Rank) -> None:
    """The optimizer gets one parameter of one dimension for each unit, and its step is that of full copies."""
    run, replica = both(rank, flat_parameters=True)
    assert run.adapter.optimizer is not None
    shapes = [tuple(one.shape) for group in run.adapter.optimizer.param_groups for one in group["params"]]
    assert len(shapes) == len(UNITS) + 1 and all(len(shape) == 1 for shape in shapes), f"parameters of shapes {shapes}"
    step_and_check(rank, run, replica, [(rank.batch(0, SHAPE),)], number=0)


@contract("OPTIMIZER-1")
@needs(Capability.ADAM)
@FLAT
@pytest.mark.parametrize("rows", [7, pytest.param(1, id="empty-shards")])
@pytest.mark.parametrize(
    ("kind", "kernels"),
    [("momentum", "foreach"), ("nesterov", "for-loop"), *(("adamw", one) for one in KERNELS), ("amsgrad", "foreach")],
)
def test_ten_steps(rank: Rank, kind: optim.Kind, kernels: optim.Kernels, rows: int, flat_parameters: bool) -> None:
    """Ten steps, for the powers of Adam's decay rates, leave the parameters and the state that full copies have."""
    # On the CPU a fused kernel rounds differently where a tensor, or a shard of it, does not fill the last vector.
    shape = (rows + 1, 64) if kernels == "fused" else (rows, 5)
    optimizer = optim.of_kind(kind, kernels)
    run, replica = both(rank, mixed.Mixed(*shape), optimizer=optimizer, flat_parameters=flat_parameters)
    for step in range(10):
        batch = [(rank.batch(step, shape),)]
        step_and_check(rank, run, replica, batch, number=step, set_to_none=step % 2 == 0)


@contract("OPTIMIZER-1")
@needs(Capability.ADAM)
@FLAT
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=OWN_OPTIMIZER)], ids=["alone", "beside-others"])
def test_steps_after_an_evaluation(rank: Rank, others: bool, kernels: optim.Kernels, flat_parameters: bool) -> None:
    """The next forward uses the step that follows an evaluation, by whichever kernels it was taken.

    Values that an evaluation has left gathered are older, and a fused kernel does not bump the version of its outputs.
    The optimizer may also have parameters that are not the model's, and have them first.
    """
    optimizer = optim.of_kind("adamw", kernels)
    shape = (8, 64)
    batch = rank.batch(3, shape)

    def evaluate(owner: Trainee) -> None:
        if not isinstance(owner, CastReplica):
            run.evaluate((batch,))

    options: dict[str, Any] = {"flat_parameters": flat_parameters, "after_backward": evaluate}
    optimizer = optim.beside_its_own(optimizer) if others else optimizer
    run, replica = both(rank, mixed.Mixed(*shape), optimizer=optimizer, **options)
    for step in range(3):
        step_and_check(rank, run, replica, [(rank.batch(step, shape),)], number=step)


@contract("OPTIMIZER-1")
@OWN_OPTIMIZER
@needs(Capability.RESHARD_AFTER_FORWARD)
@subjects(
    ("how", "flat_parameters"),
    [
        pytest.param("assigned", False, marks=needs(Capability.DTENSOR_PARAMETERS, Capability.REGISTERED_STATE)),
        pytest.param("one-by-one", False, marks=needs("flat_parameters", Capability.SUMMON_FULL_PARAMS)),
        *(
            pytest.param(how, flat, marks=needs(Capability.CAST_AFTER_INIT, *also))
            for how in ("converted", "swapped")
            for flat, also in ((False, ()), (True, ("flat_parameters",)))
        ),
    ],
    ids=["assigned", "one-by-one", "converted", "converted-flat", "swapped", "swapped-flat"],
)
def test_steps_of_parameters_that_a_script_replaced(rank: Rank, how: str, flat_parameters: bool) -> None:
    """A step of parameters that a load, user code or a conversion has replaced is used by the next forward."""
    model, batch = models.MLP(9), (rank.batch(0, (4, 9)),)

    def last_output(*, evaluates: bool) -> torch.Tensor:
        run = rank.run(
            models.copy_of(model), units=[["in_proj"]], reshard_after_forward=False, flat_parameters=flat_parameters
        )
        module = run.adapter.module
        if how == "assigned":
            module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
        if how == "one-by-one":
            replace_parameters(run, "in_proj", "out_proj")
        if how in ("converted", "swapped"):
            _convert(rank, module, swaps=how == "swapped")
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        run.forward_backward(batch, loss=models.mean_square)
        if evaluates:
            run.evaluate(batch)
        optimizer.step()
        return run.evaluate(batch)[0]

    before = models.copy_of(model).to(rank.device)(*batch)
    found, expected = last_output(evaluates=True), last_output(evaluates=False)
    # The first step of Adam moves each parameter by the learning rate.
    assert float((expected - before).detach().abs().max()) > 1e-3, "the forward after a step is the same as before it"
    assert torch.equal(found, expected), "a forward after a step uses what one before it has left gathered"


@contract("OPTIMIZER-1")
@OWN_OPTIMIZER
@needs("flat_parameters", Capability.SUMMON_FULL_PARAMS)
@pytest.mark.parametrize("evaluates", [False, pytest.param(True, marks=needs(Capability.RESHARD_AFTER_FORWARD))])
@subjects("memory", ["same", "own"])
def test_gradients_of_parameters_that_a_script_replaced(rank: Rank, memory: str, evaluates: bool) -> None:
    """A parameter that replaces another, in the same memory or not, has the gradients from then on.

    The replaced one keeps its gradient, and values may be gathered already.
    """
    model = models.MLP(9)
    whole = models.copy_of(model).to(rank.device)
    run = rank.run(model, units=[["in_proj"]], reshard_after_forward=False if evaluates else None)
    cuts = {name: piece.cut for name, piece in run.adapter.parameters().items()}
    for step in range(3):
        batch, put = rank.batch(step, (4, 9)), {}
        if evaluates:
            run.evaluate((batch,))
        for place in ("in_proj", "out_proj"):
            owner = run.original_module(place)
            for name, parameter in list(owner.named_parameters(recurse=False)):
                value = parameter.detach()
                put[f"{place}.{name}"] = nn.Parameter(value.clone() if memory == "own" else value)
                setattr(owner, name, put[f"{place}.{name}"])
        whole.zero_grad()
        run.forward_backward((batch,), loss=models.mean_square)
        backward_of_copies(rank, whole, loss=models.mean_square(whole(batch)))
        for name, parameter in put.items():
            if parameter.numel():
                found, expected = parameter.grad, whole.get_parameter(name).grad
                assert found is not None and expected is not None, f"{name} has no gradient in {step_label(step)}"
                check_bits(f"{name} in {step_label(step)}", found, cuts[name](expected))


@contract("OPTIMIZER-1")
@OWN_OPTIMIZER
@needs(Capability.DTENSOR_PARAMETERS, Capability.REGISTERED_STATE)
def test_steps_of_parameters_that_inference_saw_first(rank: Rank) -> None:
    """A step of replaced parameters that an evaluation in inference mode gathered first is used by the next forward.

    A state dict that is taken before does not restore the old parameters.
    """
    model, batch = models.MLP(9), (rank.batch(0, (4, 9)),)

    def last_output(*, evaluates: bool) -> torch.Tensor:
        run = rank.run(models.copy_of(model), units=[["in_proj"]])
        replace_parameters(run, "in_proj", "out_proj")
        put = dict(run.adapter.named_parameters())
        run.adapter.module.state_dict()
        lost = [name for name, parameter in run.adapter.named_parameters().items() if parameter is not put[name]]
        assert not lost, f"a state dict has replaced {', '.join(lost)}"
        if evaluates:
            run.evaluate(batch, mode="inference_mode")
        run.adapter.reshard()
        optimizer = torch.optim.SGD(run.adapter.module.parameters(), lr=0.1)
        for _ in range(2):
            run.forward_backward(batch, loss=models.mean_square)
            optimizer.step()
            optimizer.zero_grad()
        return run.evaluate(batch)[0]

    found, expected = last_output(evaluates=True), last_output(evaluates=False)
    assert torch.equal(found, expected), "an evaluation before the first step changes what is trained"


def _attach(parameters: Iterable[nn.Parameter], options: dict[str, Any]) -> None:
    """Let SGD step a parameter as soon as its gradient has been added up."""
    # Imported here: the package compiles code at import, and each compilation warns.
    attach = private.need("torch.distributed.optim.apply_optimizer_in_backward._apply_optimizer_in_backward")
    attach(torch.optim.SGD, parameters, options)


def _convert(rank: Rank, module: nn.Module, *, swaps: bool) -> None:
    """Let torch replace a module's parameters, or swap new tensors into them, in a conversion.

    It does so when it converts to another kind of device, and in any conversion if user code has chosen that.
    """
    with rank.monkeypatch.context() as patch:
        patch.setattr(torch.__future__, f"_{'swap' if swaps else 'overwrite'}_module_params_on_conversion", True)
        module.to(torch.float32)


@contract("OPTIMIZER-28")
@needs("flat_parameters", Capability.SUMMON_FULL_PARAMS, Capability.TIED_PARAMETERS)
@subjects("what", ["another-shape", "in-one-of-two-places", "before-backward"])
def test_parameters_that_a_script_cannot_replace(rank: Rank, what: str) -> None:
    """A parameter that user code replaces by an incompatible one is refused by all ranks, with the reason."""
    check_refused(rank, what)


@contract("OPTIMIZER-28")
@world(4)
@needs("flat_parameters", Capability.SUMMON_FULL_PARAMS, Capability.TIED_PARAMETERS, Capability.HYBRID)
def test_parameters_of_replicas_that_a_script_cannot_replace(rank: Rank) -> None:
    """Replicas whose shards stay gathered refuse an incompatible parameter assigned between forward and backward."""
    check_refused(rank, "before-backward", mesh=rank.mesh((2, 2), ("replicate", "shard")))


def check_refused(rank: Rank, what: str, **options: Any) -> None:
    """Replace parameters, and check that all ranks refuse what follows."""
    run, batch = rank.run(ties.TiedMLP(9), reshard_after_forward=False, **options), (rank.batch(0, (4, 9)),)
    adapter = run.adapter
    loss = models.mean_square(adapter.forward(*batch)) if what == "before-backward" else None
    # Each rank has some of the parameter's elements, and notices by itself.
    held = adapter.held_parameters()["first.weight"].detach()
    other = nn.Parameter(held.repeat(2) if what == "another-shape" else held * 2)
    for name in ("first",) if what == "in-one-of-two-places" else ("first", "second"):
        run.original_module(name).weight = other
    proceed = functools.partial(adapter.forward, *batch) if loss is None else functools.partial(adapter.backward, loss)
    reasons = {"another-shape": "shape", "in-one-of-two-places": "shared"}
    Refusal(rank, proceed, may_send=True).check_names(reasons.get(what, "between forward and backward"))


@contract("OPTIMIZER-2")
@OWN_OPTIMIZER
@needs(Capability.UNUSED_OUTPUT)  # an implementation that, like DDP, decides at construction what it reduces lacks it
@FLAT
def test_groups_and_schedules(rank: Rank, flat_parameters: bool) -> None:
    """Groups have rates and decays of their own; one is added for a thawed unit, and a schedule acts on all."""
    model = mixed.Mixed(*SHAPE)
    model.high.requires_grad_(False)

    def of_the_trained(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    run, replica = both(rank, model, optimizer=of_the_trained, flat_parameters=flat_parameters)
    owners: tuple[Trainee, ...] = (run.adapter, replica)
    # Next to the root's own parameter one of the two of a unit, unless they are one tensor.
    split = in_one_tensor_with({"low.shift"}, run.adapter.held_parameters()) == {"low.shift"}
    for owner in owners:
        _set_groups(owner, first={"low.shift"} if split else set())
    schedules = [StepLR(owner.optimizer, step_size=2, gamma=0.5) for owner in owners]
    for step in range(6):
        if step == 3:
            for owner in owners:
                thawed = _of_unit(owner, "high")
                for parameter in thawed:
                    parameter.requires_grad_(True)
                owner.optimizer.add_param_group({"params": thawed, "lr": 0.02, "weight_decay": 0.2})
        step_and_check(rank, run, replica, [(rank.batch(step, SHAPE),)], number=step)
        for schedule in schedules:
            schedule.step()


@contract("OPTIMIZER-2")
@OWN_OPTIMIZER
def test_group_that_is_added(rank: Rank) -> None:
    """A unit that has gradients from the start and is in no group keeps its values until a group is added for it."""

    def of_the_root(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, *_ = parameters
        return torch.optim.SGD([first], lr=0.05, momentum=0.9, weight_decay=0.1)

    run, replica = both(rank, optimizer=of_the_root)
    owners: tuple[Trainee, ...] = (run.adapter, replica)
    for owner in owners:
        (of_root,) = owner.optimizer.param_groups[0]["params"]
        assert of_root is owner.held_parameters()["gain"], "a model's parameters do not begin with the root's own"
        owner.optimizer.add_param_group({"params": _of_unit(owner, "low"), "lr": 0.01})
    schedules = [StepLR(owner.optimizer, step_size=2, gamma=0.5) for owner in owners]
    for step in range(5):
        if step == 2:
            for owner in owners:
                owner.optimizer.add_param_group({"params": _of_unit(owner, "high"), "weight_decay": 0.2})
        step_and_check(rank, run, replica, [(rank.batch(step, SHAPE),)], number=step)
        for owner in owners:
            for parameter in _of_unit(owner, "high"):  # the optimizer zeroes only those of its groups
                parameter.grad = None
        for schedule in schedules:
            schedule.step()


def _set_groups(owner: Trainee, *, first: Set[str]) -> None:
    """Divide the optimizer's one group: the root's own parameters and the ``first``, and the rest.

    By names: the order in which an optimizer gets parameters is the adapter's own matter.

    Args:
        owner: whose optimizer it is.
        first: names of further parameters of the first group.
    """
    named = each_once(owner.held_parameters())
    in_first = [id(one) for name, one in named.items() if name in first or not name.startswith(("low.", "high."))]
    of_optimizer = owner.optimizer.param_groups[0]
    every = of_optimizer["params"]
    of_optimizer.update(params=[one for one in every if id(one) in in_first], weight_decay=0.1)
    owner.optimizer.add_param_group({"params": [one for one in every if id(one) not in in_first], "lr": 0.01})


def _of_unit(owner: Trainee, unit: str) -> list[nn.Parameter]:
    return [value for name, value in each_once(owner.held_parameters()).items() if name.startswith(unit)]


@contract("OPTIMIZER-3")
@OWN_OPTIMIZER
@FLAT
@pytest.mark.parametrize("average", ["exponential", "equal"])
@KEEPS
def test_averages_of_weights(
    rank: Rank, reshard_after_forward: bool | None, average: Literal["exponential", "equal"], flat_parameters: bool
) -> None:
    """An average that each rank takes of its shards is swapped in and evaluated, and training goes on without it."""
    run, replica = both(rank, flat_parameters=flat_parameters, reshard_after_forward=reshard_after_forward)
    take = get_ema_multi_avg_fn(0.75) if average == "exponential" else get_swa_multi_avg_fn()
    tensors = _locals if average == "equal" else _parameters
    owners: tuple[Trainee, ...] = (run.adapter, replica)
    averages = [[tensor.clone() for tensor in tensors(owner)] for owner in owners]
    for step in range(3):
        step_and_check(rank, run, replica, [(rank.batch(step, SHAPE),)], number=step)
        for owner, held in zip(owners, averages, strict=True):
            take(held, tensors(owner), torch.tensor(step + 1, device=rank.device))
            _exchange(tensors(owner), held)
        check_evaluation(rank, run, replica, rank.batch(step, SHAPE), number=step + 1)
        for owner, held in zip(owners, averages, strict=True):
            _exchange(tensors(owner), held)
    check_evaluation(rank, run, replica, rank.batch(3, SHAPE), number=3)


@contract("OPTIMIZER-3")
@needs(Capability.DTENSOR_PARAMETERS, Capability.REGISTERED_STATE)
def test_writes_next_to_a_replaced_parameter(rank: Rank) -> None:
    """An evaluation uses what user code wrote to a shard of a unit, of which another parameter was replaced."""
    plain: Any = models.copy_of(model := models.MLP(9)).to(rank.device)
    run = rank.run(model, reshard_after_forward=False)
    module: Any = run.adapter.module
    batch = (rank.batch(0, (4, 9)),)
    module.out_proj.bias = nn.Parameter(module.out_proj.bias.detach().clone())
    shard = local_of(module.out_proj.weight)
    for _ in range(3):
        run.evaluate(batch)
        with torch.no_grad():
            shard.mul_(0.5)
            plain.out_proj.weight.mul_(0.5)
        (found,) = run.evaluate(batch)
        with torch.no_grad():
            check_bits("output", found, plain(*batch), sides="sharded, plain")


def _parameters(owner: Trainee) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in each_once(owner.held_parameters()).values()]


@torch.no_grad()
def _locals(owner: Trainee) -> list[torch.Tensor]:
    """This rank's parts of the parameters, as plain tensors in the same memory."""
    held = each_once(owner.held_parameters()).values()
    return [local_of(one).detach() for one in held]


@torch.no_grad()
def _exchange(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Exchange the values of tensors with those of others, in place."""
    for tensor, other in zip(tensors, others, strict=True):
        before = tensor.clone()
        tensor.copy_(other)
        other.copy_(before)


@contract("OPTIMIZER-4")
@needs(Capability.OWN_OPTIMIZER, Capability.DTENSOR_PARAMETERS)
def test_updates_of_full_matrices(rank: Rank) -> None:
    """An optimizer that needs full matrices and norms finds them through the DTensors of parameters and gradients."""
    run, replica = both(rank, step=_orthogonal_step)
    for step in range(3):
        step_and_check(rank, run, replica, [(rank.batch(step, SHAPE),)], number=step)


@torch.no_grad()
def _orthogonal_step(owner: Trainee) -> None:
    """Orthogonalise each gradient, and scale it by norms of the parameter and of the gradient, as Muon and LAMB do."""
    for parameter in each_once(owner.held_parameters()).values():
        gradient = parameter.grad
        assert gradient is not None
        update = full_of(gradient) / full_of(torch.linalg.vector_norm(gradient, float("inf"))) / 8
        for _ in range(2):
            update = 1.5 * update - 0.5 * update @ update.T @ update
        update *= full_of(torch.linalg.vector_norm(parameter, float("inf")))
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            whole = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
            update = whole.redistribute(placements=parameter.placements)
        parameter.add_(update, alpha=-0.125)


def _change(parameter: nn.Parameter, change: str) -> None:
    """Change a gradient as user code does."""
    assert parameter.grad is not None
    match change:
        case "scale":
            parameter.grad *= 2
        case "set":
            parameter.grad.fill_(0.25)
        case "drop":
            parameter.grad = None
        case "replace":
            parameter.grad = torch.full_like(parameter, 0.25)
        case "replace-data":
            parameter.grad.data = parameter.grad * 3


@contract("OPTIMIZER-5")
@OWN_OPTIMIZER
@FLAT
@pytest.mark.parametrize(
    ("change", "set_to_none"),
    [
        *(pytest.param(change, True, id=f"{change}-none") for change in ("scale", "set", "drop", "replace")),
        *(pytest.param(change, False, id=f"{change}-zeros") for change in ("scale", "set", "drop", "replace")),
        pytest.param("replace-data", True, id="replace-data-none", marks=needs("flat_parameters")),
        # Only where the next gradients are added to these does it matter that their memory is another.
        pytest.param("replace-data", False, id="replace-data-zeros", marks=needs("flat_parameters")),
    ],
)
def test_gradients_that_a_script_changes(rank: Rank, change: str, set_to_none: bool, flat_parameters: bool) -> None:
    """The step uses the gradients that user code scaled, set, dropped or replaced, and the next backward its own."""
    changed = itertools.cycle(["low", "low", "high", "high"])  # in turn, each in the baseline and in the sharded run

    def after_backward(owner: Trainee) -> None:
        unit = next(changed)
        for name, parameter in each_once(owner.held_parameters()).items():
            # A rank that holds no element of a parameter may have no gradient of it.
            if name.startswith(unit) and parameter.grad is not None:
                _change(parameter, change)

    run, replica = both(rank, after_backward=after_backward, flat_parameters=flat_parameters)
    for step in range(4):
        step_and_check(rank, run, replica, [(rank.batch(step, SHAPE),)], number=step, set_to_none=set_to_none)


@contract("OPTIMIZER-5")
@OWN_OPTIMIZER
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_gradients_that_the_optimizer_clears(rank: Rank, set_to_none: bool) -> None:
    """User code may clear gradients by the optimizer's own ``zero_grad``; then the next backward starts anew."""
    run, replica = both(rank)
    for step in range(3):
        step_and_check(rank, run, replica, [(rank.batch(step, SHAPE),)], number=step, set_to_none=False)
        assert run.adapter.optimizer is not None
        run.adapter.optimizer.zero_grad(set_to_none=set_to_none)


class Terms(nn.Module):
    """``x * first + 2 * x * second + third``. Of two ranks that divide it, each has a part of the second parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(*SHAPE)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x * self.first + 2 * x * self.second + self.third
        return output


class Sums(nn.Module):
    """Two units and a parameter of the root, whose gradients are multiples of the input, or ones.

    Input and output: (rows, columns).
    """

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = Terms(), Terms()
        self.gain = nn.Parameter(torch.zeros(*SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.low(x) + self.high(x) + self.gain * x
        return output


def _by_columns(gradient: torch.Tensor) -> torch.Tensor:
    """A copy whose elements lie in memory column by column."""
    return gradient.t().clone(memory_format=torch.contiguous_format).t() if gradient.ndim == 2 else gradient.clone()


#: What user code sets as the gradient of a parameter.
REPLACEMENTS: dict[str, Any] = {
    "drop": lambda one: None,
    "set": lambda one: torch.full_like(one, 0.25),
    "double": lambda one: None if one.grad is None else one.grad * 2,
    "double-by-columns": lambda one: None if one.grad is None else _by_columns(one.grad * 2),
}
_REPLICATED = needs(Capability.NO_SHARD)
_FLAT = needs("flat_parameters")
#: Full shards, shards that stay gathered until backward, and none.
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "kept": {"reshard_after_forward": False},
    "replicated": {"shards": False},
}  # fmt: skip


@contract("OPTIMIZER-8")
@OWN_OPTIMIZER
@needs(Capability.SHARDED, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize(
    ("strategy", "flat_parameters"),
    [
        *(("full", False), ("kept", False), pytest.param("replicated", False, marks=_REPLICATED)),
        pytest.param("full", True, marks=_FLAT),
        pytest.param("replicated", True, marks=[_REPLICATED, _FLAT]),
    ],
    ids=["full", "kept", "replicated", "full-flat", "replicated-flat"],
)
@pytest.mark.parametrize("moment", ["before-forward", "before-backward", "after-backward", "before-an-evaluation"])
@pytest.mark.parametrize("what", ["drop", "set", "double"])
def test_gradient_that_a_script_replaces(
    rank: Rank, what: str, moment: str, strategy: str, flat_parameters: bool
) -> None:
    """One parameter's gradient that user code replaces at any moment is used; those beside it in its unit stay."""
    _check_replaced(rank, what, moment, strategy, flat_parameters=flat_parameters)


@contract("OPTIMIZER-8")
@OWN_OPTIMIZER
@needs(Capability.SHARDED, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("strategy", ["full", pytest.param("replicated", marks=_REPLICATED)])
def test_gradient_of_other_strides(rank: Rank, strategy: str) -> None:
    """A gradient that user code replaces may lie in memory column by column."""
    _check_replaced(rank, "double-by-columns", "after-backward", strategy)


@contract("OPTIMIZER-8")
@world(2, debug_level="INFO")
@OWN_OPTIMIZER
@needs(Capability.SHARDED, Capability.RESHARD_AFTER_FORWARD, Capability.FSDP1_API)
def test_gradient_that_is_replaced_at_a_debug_level(rank: Rank) -> None:
    """At a debug level, at which some implementations warn of each replaced gradient, it is used too."""
    _check_replaced(rank, "set", "before-forward", "full")
    _check_replaced(rank, "drop", "before-an-evaluation", "replicated")


def _check_replaced(rank: Rank, what: str, moment: str, strategy: str, *, flat_parameters: bool = False) -> None:
    """Train with a gradient that is replaced at a moment, and compare with full copies (collective).

    Gradients are added up over two steps, and then begin anew. All numbers are multiples of powers of two, so that the
    bits are equal.
    """
    model, factory = Sums(), optim.sgd(lr=2.0**-3, momentum=0.5)
    plain = models.copy_of(model).to(rank.device)
    run = rank.run(model, units=UNITS, optimizer=factory, flat_parameters=flat_parameters, **STRATEGIES[strategy])
    optimizer = factory(plain.parameters())
    assert run.adapter.optimizer is not None
    changed = in_one_tensor_with({"low.second"}, run.adapter.held_parameters())

    def replace() -> None:
        for parameters in (run.adapter.held_parameters(), dict(plain.named_parameters())):
            for parameter in each_once({name: parameters[name] for name in sorted(changed)}).values():
                if parameter.numel():
                    parameter.grad = REPLACEMENTS[what](parameter)

    for step in range(3):
        batch = torch.round(rank.batch(step, SHAPE) * 2) + rank.index
        if moment == "before-forward":
            replace()
        output = run.adapter.forward(batch)
        if moment == "before-backward":
            replace()
        run.adapter.backward(output.sum())
        backward_of_copies(rank, plain, loss=plain(batch).sum())
        if moment in ("after-backward", "before-an-evaluation"):
            replace()
        if moment == "before-an-evaluation":
            run.evaluate((batch,))
        check_gradients(run, plain, step=step)
        for one in (run.adapter.optimizer, optimizer):
            one.step()
        check_parameters(run, plain, step=step)
        if step == 1:
            for one in (run.adapter.optimizer, optimizer):
                one.zero_grad()


@contract("OPTIMIZER-7")
@needs(Capability.STEP_IN_BACKWARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_steps_in_backward(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Optimizers that are attached to the parameters train the same bits as one that steps after backward.

    Backward leaves no gradient.
    """
    model, options = mixed.Mixed(*SHAPE), {"lr": 0.05, "momentum": 0.9}
    # The root's own unit has three parameters, so that a rank holds parts of several.
    kept: dict[str, Any] = {"units": UNITS[:1], "reshard_after_forward": reshard_after_forward}
    ordinary = rank.run(copy.deepcopy(model), optimizer=optim.sgd(lr=0.05), **kept)
    attached = rank.run(model, **kept)
    _attach(each_once(attached.adapter.held_parameters()).values(), options)
    for step in range(3):
        batch = [(rank.batch(step, SHAPE),)]
        pictures = [run.step(batch, loss=torch.sum) for run in (ordinary, attached)]
        left = [name for name, piece in pictures[1].gradients.items() if piece is not None]
        assert not left, f"backward leaves gradients of {', '.join(left)} in {step_label(step)}"
        check_exact(rank, *pictures, step=step, why="the same kernels on the same shards, one parameter at a time")


@contract("OPTIMIZER-7")
@needs(Capability.STEP_IN_BACKWARD, "flat_parameters")
@pytest.mark.parametrize("units", [[], UNITS], ids=["root-alone", "units"])
def test_steps_in_backward_of_flat_parameters(rank: Rank, units: list[list[str]]) -> None:
    """Optimizers that are attached to flat parameters are refused in the first forward, before anything is sent."""
    run = rank.run(mixed.Mixed(*SHAPE), units=units, flat_parameters=True)
    flat = [parameter for parameter in run.adapter.module.parameters() if parameter.requires_grad]
    _attach(flat, {"lr": 0.05})
    Refusal(rank, lambda: run.adapter.forward(rank.batch(0, SHAPE))).check_names("optimizer in backward")
