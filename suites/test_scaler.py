"""Chapter SCALER: losses that are scaled, so that small gradients of float16 are not lost."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Hardware, Rank, Run, contract, needs, world
from shardproof.testing.axes import DELAYS
from shardproof.testing.casts import CastReplica, check_equal, run_and_replica
from shardproof.testing.compare import local_of, step_label
from shardproof.testing.make import Clip, Precision, Trainee, cut_over
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import mixed, optim

pytestmark = [needs(Capability.LOSS_SCALING, Capability.OWN_OPTIMIZER), world(2)]
HALF = Precision(param_dtype=torch.float16, reduce_dtype=torch.float32)
LOW = needs(*HALF.needs())
PINNED = pytest.param("pinned", marks=needs(Hardware.ACCELERATOR))
SHAPE = (7, 6)
NAMES = ("replicate", "shard")
UNITS = (("low",), ("high",))
SCALE = 2.0**10
#: The steps in which one gradient of one rank is infinite. The scale is doubled after two others.
INFINITE = (1, 4)
#: The scale after each step, relative to the first.
SCALES = [SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE / 2]


class Scaling:
    """Scales the losses of a sharded run, which clips by itself, and of its baseline, each by a scaler of its own."""

    def __init__(self, clip: Clip | None) -> None:
        self._scalers: dict[Trainee, torch.amp.GradScaler] = {}
        self._clip = clip

    def begin(self, run: Run, replica: CastReplica) -> None:
        """Make the scalers."""
        device = run.adapter.config.mesh.device_type
        self._scalers[run.adapter] = run.adapter.grad_scaler(init_scale=SCALE, growth_interval=2)
        self._scalers[replica] = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=2)

    def loss(self, output: torch.Tensor, *, owner: Trainee) -> torch.Tensor:
        """The scaled loss."""
        scaled: torch.Tensor = self._scalers[owner].scale(output.float().sum())
        return scaled

    def unscale(self, owner: Trainee) -> None:
        """Unscale between backward and step; from here on gradients are those of the unscaled loss."""
        self._scalers[owner].unscale_(owner.optimizer)

    def step(self, owner: Trainee) -> None:
        """Step unless a gradient is infinite, and change the scale."""
        if self._clip is not None and isinstance(owner, CastReplica):
            nn.utils.clip_grad_norm_(owner.model.parameters(), self._clip.max_norm, self._clip.norm_type)
        self._scalers[owner].step(owner.optimizer)
        self._scalers[owner].update()

    def scale(self, owner: Trainee) -> float:
        """The scale of the next loss."""
        return float(self._scalers[owner].get_scale())


@contract("SCALER-1")
@pytest.mark.parametrize("flat_parameters", [False, pytest.param(True, marks=needs("flat_parameters"))])
@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=needs("clip.norm_type"))])
@pytest.mark.parametrize("precision", [Precision(), pytest.param(HALF, marks=LOW)], ids=["float32", "float16"])
def test_infinite_gradients(rank: Rank, precision: Precision, clips: bool, flat_parameters: bool) -> None:
    """An infinite gradient in one rank's shard makes all ranks skip the step and lower the scale."""
    # The maximum is the one norm that does not depend on the order in which ranks are summed.
    clip = Clip(2.0**-4, float("inf")) if clips else None
    check(rank, precision=precision, clip=clip, flat_parameters=flat_parameters)


@contract("SCALER-1")
def test_rank_without_a_gradient(rank: Rank) -> None:
    """A rank that holds no element with a gradient lowers the scale with the others."""
    model = mixed.Mixed(*SHAPE)  # in a flat parameter of two ranks the first one holds the weight
    for parameter in (model.low.shift, model.high.shift, model.gain):
        parameter.requires_grad_(False)
    check(rank, model)


@contract("SCALER-1")
@world(4)
@LOW
@needs(Capability.HYBRID)
def test_replicas(rank: Rank) -> None:
    """An infinite gradient in one replica makes all ranks skip the step and lower the scale."""
    check(rank, precision=HALF, mesh=rank.mesh((2, 2), NAMES))


@contract("SCALER-1")
@world(2)  # the order of a sum of four is not the baseline's
@LOW
@needs(Capability.HYBRID, Capability.SINGLE_RANK)
def test_replicas_of_one(rank: Rank) -> None:
    """An infinite gradient of one rank, which has all parameters, makes the others skip the step too."""
    check(rank, precision=HALF, mesh=rank.mesh((2, 1), NAMES))


@contract("SCALER-1")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
@pytest.mark.parametrize("precision", [Precision(), pytest.param(HALF, marks=LOW)], ids=["float32", "float16"])
def test_tensor_parallel_shards(rank: Rank, precision: Precision) -> None:
    """An infinite gradient in one tensor-parallel rank's shard makes all ranks skip the step and lower the scale."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    check(rank, precision=precision, **cut_over(mesh, mixed.split_columns))


class Apart(nn.Module):
    """Two units, each with an input and a part of the output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.all = mixed.Scale(*SHAPE), mixed.Scale(*SHAPE)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.few(x) + self.all(y)
        return output


@contract("SCALER-1")
@world(4)
@needs("unit_meshes")
@pytest.mark.parametrize("infinite", ["few", "all"])
@pytest.mark.parametrize("first", ["few", "all"])
def test_several_meshes(rank: Rank, first: str, infinite: str) -> None:
    """An infinite gradient of a unit makes all ranks skip the step and lower the scale, if two of them shard it too."""

    def ordered(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = [*parameters]
        return torch.optim.SGD(given if first == "few" else given[::-1], lr=0.5)

    few = rank.mesh((2, 2), ("copy", "shard"))["shard"]
    run = rank.run(Apart(), units=[["few"], ["all"]], optimizer=ordered, unit_meshes={"few": few})
    scaler, optimizer = run.adapter.grad_scaler(init_scale=SCALE, growth_interval=2), run.adapter.optimizer
    assert optimizer is not None
    for step, expected_scale in enumerate(SCALES):
        inputs = {name: rank.batch(step, SHAPE) for name in ("few", "all")}
        if step in INFINITE and rank.index == rank.world_size - 1:
            inputs[infinite][-1, -1] = torch.inf
        before = {name: piece.tensor.clone() for name, piece in run.adapter.parameters().items()}
        run.adapter.backward(scaler.scale(run.adapter.forward(inputs["few"], inputs["all"]).sum()))
        scaler.step(optimizer)
        scaler.update()
        run.adapter.zero_grad(set_to_none=True)
        moved = {name for name, one in run.adapter.parameters().items() if not torch.equal(one.tensor, before[name])}
        ranks = [index for index, names in enumerate(rank.exchange(moved)) if names]
        expected = [] if step in INFINITE else [*range(rank.world_size)]
        assert ranks == expected, f"in {step_label(step)} the ranks {ranks} step instead of {expected}"
        scale = scaler.get_scale()
        assert scale == expected_scale, f"the scale after {step_label(step)} is {scale} instead of {expected_scale}"


@dataclasses.dataclass(frozen=True)
class Course:
    """Steps of a scaler, in each of which every gradient is half of the scale, and one on some ranks is not finite.

    Attributes:
        options: of the scaler, besides ``init_scale=SCALE`` and ``growth_interval=2``.
        wrong: for each step, the ranks on which a gradient is not finite; negative ones count from the last.
        value: what that gradient is.
        scales: what ``update`` is given after a step; a number, or a tensor of it.
        unscales: whether user code unscales before the step.
        reloads: the steps before which another scaler loads the state of the last one.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    wrong: Sequence[tuple[int, ...]] = ((), (-1,), (), (0,), ())
    value: float = torch.inf
    scales: dict[int, Any] = dataclasses.field(default_factory=dict)
    unscales: bool = False
    reloads: tuple[int, ...] = ()


COURSES = {
    "one-rank": Course(),
    "each-rank": Course(wrong=((), (0, -1), (), (0, 1, -1), ())),
    "nan": Course(value=torch.nan, wrong=((-1,), (0,), (0, -1))),
    "minus-infinity": Course(value=-torch.inf),
    "unscaled-first": Course(unscales=True),
    "own-factors": Course({"growth_factor": 4.0, "backoff_factor": 0.125, "growth_interval": 1}),
    "odd-scale": Course({"init_scale": 3.0, "growth_factor": 1.5, "growth_interval": 1}),
    # The next scale would be infinite, and so would all losses from there on.
    "largest-scale": Course({"init_scale": 2.0**126, "growth_interval": 1}, wrong=((), (), (), (0,), ())),
    "smallest-scale": Course({"init_scale": 2.0**-126}, wrong=((), (0,), ())),
    "set-by-a-number": Course(scales={0: 8.0, 2: 0.5}),
    "set-by-a-tensor": Course(scales={0: torch.tensor(8.0), 2: torch.tensor(0.5)}),
    "saved-and-loaded": Course(wrong=((), (0,), (), (), ()), reloads=(1, 3)),
    "disabled": Course({"enabled": False}, unscales=True),
    # Numbers at which nothing is scaled any more, or only once. A plain scaler takes them.
    "no-scale": Course({"init_scale": 0.0}),
    "infinite-scale": Course({"init_scale": torch.inf}),
    "no-scale-after-an-infinity": Course({"backoff_factor": 0.0}, wrong=((), (-1,), ())),
    "infinite-growth": Course({"growth_factor": torch.inf, "growth_interval": 1}),
    "no-growth": Course({"growth_interval": 0}),
    "set-to-zero": Course(scales={0: 0.0}),
    "set-to-infinity": Course(scales={0: torch.inf}),
}


@contract("SCALER-3")
@needs(Capability.SHARDED)
@pytest.mark.parametrize("course", COURSES)
def test_course_of_a_scaler(rank: Rank, course: str) -> None:
    """Scale, growth, gradients and steps are those of a plain scaler, with any of its options and at their bounds.

    The plain scaler has one parameter, with a gradient that is not finite if any rank has one.
    """
    how = COURSES[course]
    options = {"init_scale": SCALE, "growth_interval": 2} | how.options
    run = rank.run(mixed.Mixed(*SHAPE), units=UNITS, optimizer=optim.sgd(lr=1.0))
    plain = nn.Parameter(torch.zeros(4, device=rank.device))
    sides = [_Side(run.adapter.optimizer, functools.partial(run.adapter.grad_scaler, **options))]
    kind = functools.partial(torch.amp.GradScaler, rank.device.type, **options)
    sides.append(_Side(torch.optim.SGD([plain], lr=1.0), kind))
    for step, wrong in enumerate(how.wrong):
        ranks = {index % rank.world_size for index in wrong}
        mine = [_sees(rank, ranks), bool(ranks)]
        found, expected = (side.step(how, step, is_wrong=one) for side, one in zip(sides, mine, strict=True))
        everyone = rank.exchange(found)
        assert all(one == expected for one in everyone), (
            f"after {step_label(step)} a plain scaler and its parameter have {expected}, and the ranks have {everyone}"
        )


def _sees(rank: Rank, ranks: Collection[int]) -> bool:
    """Whether this rank has the wrong gradient of some: where gradients are not divided, all have the same."""
    return rank.index in ranks if "gradients" in rank.implementation.traits.shards else bool(ranks)


class _Side:
    """An optimizer and its scaler."""

    def __init__(self, optimizer: Any, make: Callable[[], torch.amp.GradScaler]) -> None:
        self._optimizer, self._make = optimizer, make
        self._scaler = make()

    def step(self, how: Course, number: int, *, is_wrong: bool) -> dict[str, Any]:
        """Make a step, and return the scale, the counter, the unscaled gradients and whether parameters moved."""
        if number in how.reloads:
            state, self._scaler = self._scaler.state_dict(), self._make()
            self._scaler.load_state_dict(state)
        loss = self._scaler.scale(torch.ones((), device=next(self._parameters()).device))
        before = [one.detach().clone() for one in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = torch.full_like(parameter, self._scaler.get_scale() / 2)
        last = [local_of(one.grad) for one in self._parameters() if one.grad is not None and local_of(one.grad).numel()]
        if is_wrong and last:
            last[-1].flatten()[-1] = how.value
        if how.unscales:
            self._scaler.unscale_(self._optimizer)
        self._scaler.step(self._optimizer)
        gradients = sorted({value for one in last for value in one.flatten().tolist() if 0 < value < torch.inf})
        scale = how.scales.get(number)
        self._scaler.update(scale.to(loss.device) if isinstance(scale, torch.Tensor) else scale)
        moved = {not torch.equal(one, other) for one, other in zip(before, self._parameters(), strict=True)}
        return {
            "loss": float(loss),
            "scale": self._scaler.get_scale(),
            "counter": self._scaler.state_dict().get("_growth_tracker"),
            "gradients": gradients,
            "moved": moved,
        }

    def _parameters(self) -> Iterator[Any]:
        for group in self._optimizer.param_groups:
            yield from (one for one in group["params"] if local_of(one).numel())


@contract("SCALER-3")
@needs(Capability.SHARDED)
def test_several_optimizers_of_a_scaler(rank: Rank) -> None:
    """Of two optimizers, the one with an infinite gradient on one rank skips its step, and the scale falls once."""
    run = rank.run(mixed.Mixed(*SHAPE), units=UNITS, optimizer=optim.sgd(lr=1.0))
    held = run.adapter.held_parameters()
    units = {unit: [one for name, one in held.items() if name.startswith(unit)] for unit in ("low", "high")}
    optimizers = {unit: torch.optim.SGD(given, lr=1.0) for unit, given in units.items()}
    scaler = run.adapter.grad_scaler(init_scale=SCALE, growth_interval=2)
    scaler.scale(torch.ones((), device=rank.device))
    for wrong in ("low", "high", "low high", ""):
        before = {name: local_of(one).detach().clone() for name, one in held.items()}
        for unit, given in units.items():
            for one in given:
                one.grad = torch.full_like(one, 2.0)
                if unit in wrong and _sees(rank, {rank.world_size - 1}):
                    local_of(one.grad).fill_(torch.inf)
        expected_scale = scaler.get_scale() / (2 if wrong else 1)
        for optimizer in optimizers.values():
            scaler.step(optimizer)
        scaler.update()
        held_more = [name for name, value in before.items() if value.numel()]
        moved = {
            name.split(".")[0] for name in held_more if not torch.equal(local_of(held[name]).detach(), before[name])
        }
        expected = {unit for unit in units if unit not in wrong and any(name.startswith(unit) for name in held_more)}
        assert moved == expected, f"with infinite gradients of {wrong or 'none'}, {moved} move instead of {expected}"
        assert scaler.get_scale() == expected_scale, (
            f"with infinite gradients of {wrong} the scale is {scaler.get_scale()}"
        )


@contract("SCALER-3")
@world(4)
@needs(Capability.FSDP1_API, Capability.HYBRID)
def test_scaler_of_a_subgroup(rank: Rank) -> None:
    """A scaler with a process group of its own asks its ranks alone: those of another group make their step."""
    mesh = rank.mesh((2, 2), ("copy", "shard"))["shard"]
    run = rank.run(mixed.Mixed(*SHAPE), units=UNITS, optimizer=optim.sgd(lr=1.0), mesh=mesh)
    scaler = run.adapter.grad_scaler(init_scale=SCALE, growth_interval=2, process_group=mesh.get_group())
    wrong = (False, True, False, False)
    side = _Side(run.adapter.optimizer, lambda: scaler)
    scales = [side.step(Course(), step, is_wrong=one and rank.index == 0)["scale"] for step, one in enumerate(wrong)]
    # Doubled after two steps without infinities.
    expected = [SCALE, SCALE / 2, SCALE / 2, SCALE] if rank.index < 2 else [SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE]
    assert scales == expected, f"the scales on this rank are {scales}, not {expected}"


#: Losses that a scaler takes, from a list of three tensors.
OUTPUTS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "tensor": lambda given: given[0],
    "list": lambda given: given,
    "tuple": tuple,
    "nested": lambda given: [given[0], (given[1], [given[2]])],
    "iterator": iter,
    "generator": lambda given: (one for one in given),
    "set of one": lambda given: {given[0]},
    "list of none": lambda given: [],
}


@contract("SCALER-3")
@needs(Capability.FSDP1_API)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=lambda one: str(one)[6:]
)
def test_losses_that_a_scaler_takes(rank: Rank, dtype: torch.dtype) -> None:
    """Losses in any container are scaled in their own dtypes, and returned in containers of the same kinds."""
    adapter = rank.run(mixed.Mixed(*SHAPE), units=UNITS, optimizer=optim.sgd()).adapter
    for name, take in OUTPUTS.items():
        given = [torch.full((), value, dtype=dtype, device=rank.device) for value in (1.5, -3.0, 0.0)]
        found = adapter.grad_scaler(init_scale=SCALE, growth_interval=2).scale(take([*given]))
        expected = take([(one.double() * SCALE).to(dtype) for one in given])
        assert _shown(found) == _shown(expected), f"a {name} of losses is scaled to {_shown(found)}"
    scaler = adapter.grad_scaler(init_scale=SCALE, growth_interval=2)
    Refusal(rank, lambda: scaler.scale([3.0])).check_names("Tensor")  # type: ignore[list-item]


def _shown(value: Any) -> Any:
    """Containers as what they are, with the value and the dtype of each tensor."""
    if isinstance(value, torch.Tensor):
        return value.item(), value.dtype
    parts = [_shown(one) for one in value]
    return (type(value).__name__, parts) if isinstance(value, (list, tuple)) else parts


@contract("SCALER-3")
def test_calls_that_a_scaler_refuses(rank: Rank) -> None:
    """A scaler refuses to unscale twice, to unscale after the step, and to change the scale before any step.

    Each rank refuses, and after the next step and update all go on. Refused is too a scale that would fall by its
    growth or not by its fallback.
    """
    run = rank.run(mixed.Mixed(*SHAPE), units=UNITS, optimizer=optim.sgd())
    for name, values in {"growth_factor": (0.0, 0.5, 1.0), "backoff_factor": (1.0, 2.0, torch.inf)}.items():
        for value in values:
            options: dict[str, Any] = {"init_scale": SCALE, "growth_interval": 2, name: value}
            Refusal(rank, functools.partial(run.adapter.grad_scaler, **options)).check_names(name.replace("_", " "))
    scaler, optimizer = run.adapter.grad_scaler(init_scale=SCALE, growth_interval=2), run.adapter.optimizer
    assert optimizer is not None
    Refusal(rank, lambda: scaler.unscale_(optimizer)).check_names("scaler.scale(loss or outputs)")
    for _ in range(2):
        loss = run.adapter.forward(rank.batch(0, SHAPE)).sum()
        run.adapter.backward(scaler.scale(loss))
        Refusal(rank, scaler.update).check_names("No inf checks were recorded prior to update")
        scaler.unscale_(optimizer)
        Refusal(rank, lambda: scaler.unscale_(optimizer)).check_names("already been called")
        scaler.step(optimizer)
        Refusal(rank, lambda: scaler.unscale_(optimizer)).check_names("after step")
        scaler.update()
        run.adapter.zero_grad(set_to_none=True)


@contract("SCALER-3")
@needs(Capability.FSDP1_API)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda one: str(one)[6:])
def test_sparse_gradients_of_a_scaler(rank: Rank, dtype: torch.dtype) -> None:
    """A sparse gradient of the optimizer's own parameter, with one index twice, is unscaled, and noticed if infinite.

    Two values of one index may be finite, and their sum in float16 not.
    """
    run = rank.run(mixed.Mixed(*SHAPE), units=UNITS, optimizer=optim.sgd())
    own = nn.Parameter(torch.zeros(3, 2, dtype=dtype, device=rank.device))
    optimizer = torch.optim.SGD([*run.adapter.held_parameters().values(), own], lr=1.0)
    too_large = torch.finfo(dtype).max * 0.75 if dtype is torch.float16 else torch.inf
    scaler = run.adapter.grad_scaler(init_scale=2.0, growth_interval=5)
    for value, scale in ((4.0, 2.0), (too_large, 1.0)):
        run.adapter.backward(scaler.scale(run.adapter.forward(rank.batch(0, SHAPE)).sum()))
        entries = torch.full((3, 2), 4.0, dtype=dtype, device=rank.device)
        if rank.index == rank.world_size - 1:
            entries[:2, 1] = value
        own.grad = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]], device=rank.device), entries, own.shape)
        scaler.step(optimizer)
        scaler.update()
        found = (own.tolist(), scaler.get_scale())
        expected = ([[-4.0, -4.0], [0.0, 0.0], [-2.0, -2.0]], scale)
        assert found == expected, f"with values of {value} the parameter and the scale are {found}, not {expected}"
        run.adapter.zero_grad(set_to_none=True)


@contract("SCALER-3")
@needs(Capability.FSDP1_API)
def test_sum_of_a_sparse_gradient_in_float16(rank: Rank) -> None:
    """Several values of one index in float16 are added up in float32, and rounded once."""
    run = rank.run(mixed.Mixed(*SHAPE), units=UNITS, optimizer=optim.sgd())
    own = nn.Parameter(torch.zeros(2, dtype=torch.float16, device=rank.device))
    optimizer = torch.optim.SGD([*run.adapter.held_parameters().values(), own], lr=1.0)
    scaler = run.adapter.grad_scaler(init_scale=1.0, growth_interval=5)
    run.adapter.backward(scaler.scale(run.adapter.forward(rank.batch(0, SHAPE)).sum()))
    # float16 has no number between 2048 and 2050.
    entries = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16, device=rank.device)
    own.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 1]], device=rank.device), entries, own.shape)
    scaler.step(optimizer)
    assert own.tolist() == [0.0, -2050.0], f"steps by 2048, 1 and 1 of one index lead to {own.tolist()}, not to -2050"


@contract("SCALER-2")
@needs(Capability.OFFLOAD)
@pytest.mark.parametrize("offload", [pytest.param("pageable", marks=needs(Capability.PAGEABLE_OFFLOAD)), PINNED])
@pytest.mark.parametrize("delayed", [False, pytest.param(True, marks=needs(Hardware.STREAMS))])
def test_gradients_on_the_cpu(rank: Rank, delayed: bool, offload: str) -> None:
    """An infinite gradient on the CPU, also a late one, makes all ranks skip the step and lower the scale."""
    delays = [DELAYS["before-reduce-scatter"]] if delayed else []
    check(rank, offload=offload, delays=delays)


def check(rank: Rank, model: mixed.Mixed | None = None, **options: Any) -> None:
    """Train five steps, in two of which a gradient is infinite, and compare each with full copies and plain scaling."""
    scaling = Scaling(options.get("clip"))
    # Powers of two, so that a kernel on the CPU and one on a device round alike.
    optimizer = optim.sgd(lr=2.0**-5, momentum=0.5)
    hooks: dict[str, Any] = {"after_backward": scaling.unscale, "step": scaling.step}
    run, replica = run_and_replica(
        rank, model or mixed.Mixed(*SHAPE), units=UNITS, optimizer=optimizer, **hooks, **options
    )
    scaling.begin(run, replica)
    for step, expected_scale in enumerate(SCALES):
        x = rank.batch(step, SHAPE, mesh=options.get("mesh"))
        if step in INFINITE and run.adapter.config.data_ranks.index(rank.index) == 0:
            x[-1, -1] = torch.inf  # an element of the last rank's shard
        expected = replica.step([(x,)], loss=functools.partial(scaling.loss, owner=replica))
        found = run.step([(x,)], loss=functools.partial(scaling.loss, owner=run.adapter))
        check_equal(rank, run, found, expected, number=step)
        assert scaling.scale(replica) == expected_scale
        scale = scaling.scale(run.adapter)
        assert scale == expected_scale, f"the scale after {step_label(step)} is {scale} instead of {expected_scale}"
