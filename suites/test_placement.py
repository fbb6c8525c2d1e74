"""Chapter PLACEMENT: which elements a rank holds, and what a parameter's DTensor says of it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.adapters.base import Clip
from shardproof.harness.adapters.dtensor import piece_of
from shardproof.harness.models import shapes
from shardproof.harness.models.experts import ExpertModel
from shardproof.harness.models.parallel import MLPStack, parallelize_mlps
from shardproof.harness.parity import Rank, exact_difference
from shardproof.harness.plugin.axes import RESHARD

HYBRID = pytest.param(True, marks=needs(Capability.HYBRID))


def largest(parameter: nn.Parameter) -> int:
    """The largest dimension."""
    return max(range(parameter.ndim), key=lambda dim: parameter.shape[dim])


def last(parameter: nn.Parameter) -> int | None:
    """The last dimension of matrices, counted from the end, and the default of the rest."""
    return -1 if parameter.ndim > 1 else None


CHOICES = {"largest": largest, "last": last}


@contract("PLACEMENT-1")
@world(2, 4)
@needs(Capability.REGISTERED_STATE)
@pytest.mark.parametrize("replicas", [False, HYBRID])
def test_layout(rank: Rank, replicas: bool) -> None:
    """A parameter is on the given mesh, cut along its first dimension and replicated along the replicas.

    It has its global shape, stride and dtype, and its shards together are the parameter bit for bit, before the first
    forward and after a step.
    """
    size = rank.world_size
    mesh = rank.mesh((2, size // 2), ("replicate", "shard")) if replicas else rank.mesh()
    model = shapes.ManyShapes()
    full = {name: value.detach().clone() for name, value in model.named_parameters()}
    pair = rank.pair(model, units=[["body"]], mesh=mesh)
    check_layout(pair.adapter.named_parameters(), full, mesh, dims=dict.fromkeys(full, 0))
    pair.step(rank.batch(0, (2, 3, 6, 6)))
    pair.check()
    trained = {name: value.detach() for name, value in pair.baseline.adapter.named_parameters().items()}
    shown = pair.adapter.named_parameters()
    check_layout(shown, trained, mesh, dims=dict.fromkeys(full, 0), has_values=False)


@contract("PLACEMENT-2")
@world(2, 4)
@needs(Capability.SHARD_DIMENSION)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("choice", CHOICES)
def test_other_dimensions(rank: Rank, choice: str, reshard_after_forward: bool | int | None) -> None:
    """Parameters cut along another dimension, between others, train and clip as DDP does."""
    model = models.Tower(dim=8)
    full = {name: value.detach().clone() for name, value in model.named_parameters()}
    dims = {name: CHOICES[choice](value) or 0 for name, value in model.named_parameters()}
    pair = rank.pair(
        model,
        units=model.units(),
        reshard_after_forward=reshard_after_forward,
        shard_dim=CHOICES[choice],
        clip=Clip(0.01),
    )
    check_layout(pair.adapter.named_parameters(), full, rank.mesh(), dims=dims)
    for step in range(3):
        pair.step(rank.batch(step, (4, 8)))
        pair.check()


@contract("PLACEMENT-2")
@world(4)
@needs(Capability.SHARD_DIMENSION, Capability.RESHARD_TO_SIZE, Capability.REGISTERED_STATE)
@pytest.mark.parametrize("choice", CHOICES)
def test_other_dimensions_after_forward(rank: Rank, choice: str) -> None:
    """Sharded along other dimensions, parameters that are resharded to groups of two show the part that they claim."""
    model = models.Tower(dim=8)
    full = {name: value.detach().clone().to(rank.device) for name, value in model.named_parameters()}
    run = rank.run(model, units=model.units(), reshard_after_forward=2, shard_dim=CHOICES[choice])
    run.adapter.forward(rank.batch(0, (4, 8)))
    for name, parameter in run.adapter.named_parameters().items():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter)} after forward"
        piece = piece_of(parameter.detach())
        assert piece.tensor.numel() * 2 == full[name].numel(), f"{name} has {piece.tensor.numel()} elements"
        assert torch.equal(piece.tensor, piece.cut(full[name])), f"{name} has other values than its placement claims"


@contract("PLACEMENT-2")
@world(2, 4)
@needs(Capability.SHARD_DIMENSION)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:2])
def test_three_dimensions(rank: Rank, reshard_after_forward: bool | None) -> None:
    """Parameters of three dimensions, cut along the second or the last, counted from the end."""
    even = -(-8 // rank.world_size) * rank.world_size

    def chosen(parameter: nn.Parameter) -> int | None:
        return None if parameter.ndim < 3 else -2 if parameter.shape[-2] == even else -1

    model = ExpertModel(even, "ragged")
    full = {name: value.detach().clone() for name, value in model.named_parameters()}
    dims = {name: chosen(value) or 0 for name, value in model.named_parameters()}
    pair = rank.pair(model, units=[["experts"]], reshard_after_forward=reshard_after_forward, shard_dim=chosen)
    check_layout(pair.adapter.named_parameters(), full, rank.mesh(), dims=dims)
    for step in range(2):
        pair.step(rank.batch(step, (6, even)))
        pair.check()


@contract("PLACEMENT-2")
@world(4)
@needs(Capability.SHARD_DIMENSION)
@pytest.mark.parametrize("choice", ["same", "other"])
def test_other_dimensions_beside_tensor_parallelism(rank: Rank, choice: str) -> None:
    """The dimension may be the one that tensor parallelism has cut, or the one that it has left."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def chosen(parameter: nn.Parameter) -> int | None:
        if parameter.ndim < 2 or not isinstance(parameter, DTensor):
            return None
        placement = parameter.placements[-1]
        assert isinstance(placement, Shard)
        return placement.dim if choice == "same" else 1 - placement.dim

    model = MLPStack(16)
    full = {name: value.detach().clone() for name, value in model.named_parameters()}
    pair = rank.pair(
        model,
        units=model.units(),
        mesh=mesh["dp"],
        prepare=functools.partial(parallelize_mlps, mesh=mesh["tp"]),
        shard_dim=chosen,
        clip=Clip(0.01),
    )
    for name, parameter in pair.adapter.named_parameters().items():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter).__name__}"
        found = exact_difference(parameter.full_tensor().detach(), full[name].to(rank.device))
        assert found is None, f"the shards of {name} do not make it up: element, found and expected are {found}"
    for step in range(2):
        pair.step(rank.batch(step, (4, 16), mesh=mesh["dp"]))
        pair.check()


def check_layout(
    shown: dict[str, nn.Parameter],
    full: dict[str, torch.Tensor],
    mesh: DeviceMesh,
    *,
    dims: dict[str, int],
    has_values: bool = True,
) -> None:
    """Check the DTensors of parameters: mesh, placements, shape, stride, dtype and the full tensor (collective).

    Args:
        shown: the registered parameters, by name.
        full: the full tensors, by name.
        mesh: the mesh on which they should be.
        dims: the dimension along which each is cut.
        has_values: whether the full tensors have just these values, bit for bit.
    """
    assert shown.keys() == full.keys()
    for name, parameter in shown.items():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter).__name__}"
        expected = full[name]
        assert parameter.device_mesh == mesh, f"{name} is on {parameter.device_mesh} instead of {mesh}"
        assert parameter.device_mesh.mesh_dim_names == mesh.mesh_dim_names, f"{name}: {parameter.device_mesh}"
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(dims[name] % expected.ndim))
        assert tuple(parameter.placements) == placements, f"{name} is placed {parameter.placements}, not {placements}"
        assert (parameter.shape, parameter.stride()) == (expected.shape, expected.stride()), (
            f"{name} has the global shape {tuple(parameter.shape)} and stride {parameter.stride()}"
        )
        assert parameter.dtype == expected.dtype, f"{name} has dtype {parameter.dtype}"
        if has_values:
            found = exact_difference(parameter.full_tensor().detach(), expected.to(parameter.device))
            assert found is None, f"{name}: element, found and expected are {found}"
