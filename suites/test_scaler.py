"""Chapter SCALER: losses that are scaled, so that small gradients of float16 are not lost."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Hardware, Rank, Run, contract, needs, world
from shardproof.testing.axes import DELAYS
from shardproof.testing.casts import CastReplica, check_equal, run_and_replica
from shardproof.testing.compare import step_label
from shardproof.testing.make import Clip, Precision, Trainee, cut_over
from shardproof.testing.train import mixed, optim

pytestmark = [needs(Capability.LOSS_SCALING, Capability.OWN_OPTIMIZER), world(2)]
HALF = Precision(compute=torch.float16, reduce=torch.float32)
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
@pytest.mark.parametrize("flat_parameters", [False, pytest.param(True, marks=needs(Capability.FLAT_PARAMETERS))])
@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=needs(Capability.CLIP_ANY_NORM))])
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
@needs(Capability.UNIT_MESHES)
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
