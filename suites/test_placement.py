"""Chapter PLACEMENT: which elements a rank holds, and a parameter's DTensor."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardproof.suites.places import MeshCoordinate, chunk, coordinate_of
from shardproof.testing import Capability, Pair, Rank, contract, models, needs, simulated, world
from shardproof.testing.axes import RESHARD
from shardproof.testing.compare import check_bits, piece_of
from shardproof.testing.make import Clip, pair_of_mlps, sharded, tower
from shardproof.testing.measure import private
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import Mixture, batches, optim, parallel, shapes, train_and_check

pytestmark = world(4)

StridedShard = private.take("torch.distributed.tensor.placement_types._StridedShard")

HYBRID = pytest.param(True, marks=needs(Capability.HYBRID))


Choice = Callable[[nn.Parameter], int | None]


def largest(parameter: nn.Parameter) -> int:
    """The largest dimension."""
    return max(range(parameter.ndim), key=lambda dim: parameter.shape[dim])


def last(parameter: nn.Parameter) -> int | None:
    """The last dimension of matrices, counted from the end, and the default of the rest."""
    return -1 if parameter.ndim > 1 else None


CHOICES = {"largest": largest, "last": last}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's full parameters, by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def check_dimensions(
    rank: Rank, model: Any, choose: Choice, shape: tuple[int, ...], steps: int = 2, **options: Any
) -> None:
    """Cut each parameter along the chosen dimension, or the first; check how they lie, and train."""
    full, dims = values_of(model), {name: choose(value) or 0 for name, value in model.named_parameters()}
    pair = rank.pair(model, shard_dim=choose, **{"units": [["body"]]} | options)
    check_layout(pair.adapter.named_parameters(), full, options.get("mesh") or rank.mesh(), dims=dims)
    train_and_check(pair, batches(rank, steps, shape))


@contract("PLACEMENT-1")
@world(2, 4)
@needs(Capability.REGISTERED_STATE)
@pytest.mark.parametrize("replicas", [False, HYBRID])
@pytest.mark.parametrize("named", [False, pytest.param(True, marks=needs("shard_dim"))])
def test_layout(rank: Rank, named: bool, replicas: bool) -> None:
    """A parameter is on the given mesh, cut along its first dimension and replicated along the replicas.

    It has its global shape, stride and dtype, and its shards together are the parameter bit for bit, before the first
    forward and after a step. The same holds if user code chooses the first dimension explicitly.
    """
    size = rank.world_size
    mesh = rank.mesh((2, size // 2), ("replicate", "shard")) if replicas else rank.mesh()
    model = shapes.ManyShapes()
    full = values_of(model)
    pair = rank.pair(model, units=[["body"]], mesh=mesh, shard_dim=(lambda _: 0) if named else None)
    if pair.adapter.traits.own_mesh:
        own: Any = next(iter(pair.adapter.named_parameters().values()))
        assert torch.equal(own.device_mesh.mesh, mesh.mesh), f"sharded over {own.device_mesh} instead of {mesh}"
        mesh = own.device_mesh
    check_layout(pair.adapter.named_parameters(), full, mesh, dims=dict.fromkeys(full, 0))
    pair.checked_step(rank.batch(0, (2, 3, 6, 6)))
    trained = {name: value.detach() for name, value in pair.baseline.adapter.named_parameters().items()}
    shown = pair.adapter.named_parameters()
    check_layout(shown, trained, mesh, dims=dict.fromkeys(full, 0), has_values=False)


@contract("PLACEMENT-2")
@world(2, 4)
@needs("shard_dim")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("choice", CHOICES)
def test_other_dimensions(rank: Rank, choice: str, reshard_after_forward: bool | int | None) -> None:
    """Parameters cut along another dimension, between others, train and clip as DDP does."""
    model = models.Tower(dim=8)
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, "clip": Clip(0.01)}
    check_dimensions(rank, model, CHOICES[choice], (4, 8), 3, units=model.units(), **options)


@contract("PLACEMENT-2")
@needs("shard_dim", Capability.HYBRID)
@pytest.mark.parametrize("choice", CHOICES)
def test_other_dimensions_on_replicas(rank: Rank, choice: str) -> None:
    """On a (replicate, shard) mesh too, parameters may be cut along another dimension, and train as DDP does."""
    model, mesh = models.Tower(dim=8), rank.mesh((2, 2), ("replicate", "shard"))
    check_dimensions(rank, model, CHOICES[choice], (4, 8), units=model.units(), mesh=mesh)


@contract("PLACEMENT-2")
@needs("shard_dim", Capability.RESHARD_TO_SIZE, Capability.REGISTERED_STATE)
@pytest.mark.parametrize("choice", CHOICES)
def test_other_dimensions_after_forward(rank: Rank, choice: str) -> None:
    """Sharded along other dimensions, parameters that are resharded to groups of two have the part that they claim."""
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
@needs("shard_dim")
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:2])
def test_three_dimensions(rank: Rank, reshard_after_forward: bool | None) -> None:
    """Parameters of three dimensions, cut along the second or the last, counted from the end."""
    even = -(-8 // rank.world_size) * rank.world_size

    def chosen(parameter: nn.Parameter) -> int | None:
        return None if parameter.ndim < 3 else -2 if parameter.shape[-2] == even else -1

    options: dict[str, Any] = {"units": [["layers.0.experts"]], "reshard_after_forward": reshard_after_forward}
    check_dimensions(rank, Mixture(even), chosen, (6, even), **options)


@contract("PLACEMENT-2")
@world(2)
@needs("shard_dim")
def test_other_dimensions_after_inference_mode(rank: Rank) -> None:
    """Parameters cut along another dimension train also if the first forward ran in inference mode."""
    pair = tower(rank, dim=8, shard_dim=last)
    pair.evaluate(rank.batch(0, (2, 8), microbatch=1), mode="inference_mode")
    train_and_check(pair, batches(rank, 2, (4, 8)))


@contract("PLACEMENT-2")
@world(2, 4)
@needs("shard_dim")
def test_parameter_without_rows(rank: Rank) -> None:
    """A parameter without rows may be cut along its columns, next to others that are cut along their rows."""
    model = shapes.ManyShapes(has_empty=True)
    check_dimensions(rank, model, lambda parameter: 0 if parameter.numel() else 1, (2, 3, 6, 6))


@contract("PLACEMENT-2")
@needs("shard_dim")
@pytest.mark.parametrize("choice", ["same", "other"])
def test_other_dimensions_with_tensor_parallelism(rank: Rank, choice: str) -> None:
    """The dimension may be the one that tensor parallelism has cut, or another."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def chosen(parameter: nn.Parameter) -> int | None:
        if parameter.ndim < 2 or not isinstance(parameter, DTensor):
            return None
        placement = parameter.placements[-1]
        assert isinstance(placement, Shard)
        return placement.dim if choice == "same" else 1 - placement.dim

    model = parallel.MLPStack(16)
    full = values_of(model)
    pair = pair_of_mlps(rank, mesh, model, shard_dim=chosen, clip=Clip(0.01))
    check_shards(pair, full)
    train_and_check(pair, batches(rank, 2, (4, 16), mesh=mesh["dp"]))


@contract("PLACEMENT-2")
@needs("shard_dim", Capability.TENSOR_PARALLEL)
def test_uneven_parts_of_tensor_parallelism(rank: Rank) -> None:
    """A dimension that the ranks divide, but not within each tensor-parallel part, is refused or trains."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def chosen(parameter: nn.Parameter) -> int | None:
        return 1 if isinstance(parameter, DTensor) and parameter.placements == (Shard(1),) else None

    model = parallel.MLPStack(10)
    options: dict[str, Any] = {"mesh": mesh["dp"], "shard_dim": chosen}
    prepare = functools.partial(parallel.parallelize_mlps, mesh=mesh["tp"])
    cut = prepare(models.copy_of(model).to(rank.device))
    refusal = Refusal(rank, lambda: sharded(rank, cut, **options))
    if refusal.text is not None:
        refusal.check_names("weight", "[10, 15]")
        return
    pair = rank.pair(model, prepare=prepare, **options)
    train_and_check(pair, batches(rank, 2, (4, 10), mesh=mesh["dp"]))


def check_shards(pair: Pair, full: dict[str, torch.Tensor]) -> None:
    """The shards of each parameter together are the full values, bit for bit (collective)."""
    for name, parameter in pair.adapter.named_parameters().items():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter).__name__}"
        found, expected = parameter.full_tensor().detach(), full[name].to(parameter.device)
        check_bits(f"the shards of {name} do not make it up", found, expected)


#: The first are pipeline stages, whose ranks have parameters of their own.
FOUR = ("pp", "replicate", "shard", "tp")
FOUR_DIMENSIONS = needs(Capability.TENSOR_PARALLEL, Capability.HYBRID, Capability.REGISTERED_STATE)


@contract("PLACEMENT-3")
@world(8)
@FOUR_DIMENSIONS
@pytest.mark.parametrize(
    "sizes",
    [(1, 2, 2, 2), (2, 1, 2, 2), pytest.param((2, 2, 1, 2), marks=needs(Capability.SINGLE_RANK)), (2, 2, 2, 1)],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_four_dimensions(rank: Rank, sizes: tuple[int, ...]) -> None:
    """With pipeline stages, replicas, shards and tensor parallelism a parameter lies as documented, and trains.

    Each stage has values and data of its own. With three of the dimensions a world of eight ranks is full.
    """
    mesh = rank.mesh(sizes, FOUR)
    stage, data = mesh["pp"].get_local_rank(), mesh["replicate", "shard"]
    torch.manual_seed(rank.seeds.init + stage)
    model = parallel.MLPStack(5)
    full = values_of(model)
    pair = rank.pair(
        model, units=model.units(), mesh=data, baseline="replicated",
        prepare=functools.partial(parallel.parallelize_mlps, mesh=mesh["tp"]),
    )  # fmt: skip
    check_four_dimensions(pair.adapter.named_parameters(), full, MeshCoordinate(sizes, FOUR, rank.index))
    check_shards(pair, full)
    train_and_check(pair, batches(rank, 2, (4, 5), mesh=data, microbatch=stage))


@contract("PLACEMENT-3")
@simulated(multiple_of=16)
@FOUR_DIMENSIONS
def test_four_dimensions_of_many_ranks(rank: Rank) -> None:
    """With four dimensions of two ranks and more, a parameter lies as documented, and trains."""
    size = rank.simulates
    sizes = (2, 2, size // 8, 2)
    for index in sorted({0, 1, size // 2, size // 2 + size // 4 + 2, size - 1}):
        with rank.simulated(index) as world_of_many:
            mesh = world_of_many.mesh(sizes, FOUR)
            one = rank.simulation(
                world_of_many, functools.partial(parallel.MLPStack, 6), mesh=mesh["replicate", "shard"],
                units=[[f"layers.{number}"] for number in range(3)], optimizer=optim.sgd(),
                prepare=functools.partial(parallel.parallelize_mlps, mesh=mesh["tp"]),
            )  # fmt: skip
            full = {name: torch.empty(shape, device="meta") for name, shape in one.parameters.items()}
            coordinate = MeshCoordinate(sizes, FOUR, index)
            check_four_dimensions(one.adapter.named_parameters(), full, coordinate)
            one.step(lambda: (torch.zeros(2, 6),), loss=models.mean_square)
            check_four_dimensions(one.adapter.named_parameters(), full, coordinate)
            one.close()


def check_four_dimensions(
    shown: dict[str, nn.Parameter], full: dict[str, torch.Tensor], coordinate: MeshCoordinate
) -> None:
    """Check mesh, placements, global and local shapes of an MLPStack's registered parameters on :data:`FOUR`."""
    assert shown.keys() == full.keys()
    ranks = coordinate.along(*FOUR[1:])
    own = coordinate_of(coordinate.rank, coordinate.sizes)
    _, _, (shards, shard), (parts, part) = zip(coordinate.sizes, own, strict=True)
    for name, parameter in shown.items():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter).__name__}"
        mesh = parameter.device_mesh
        assert mesh.mesh_dim_names == FOUR[1:], f"{name} is on {mesh}"
        assert tuple(mesh.shape) == coordinate.sizes[1:], f"{name} is on a mesh of {tuple(mesh.shape)}"
        assert tuple(mesh.mesh.flatten().tolist()) == ranks, f"{name} is on the ranks {mesh.mesh.tolist()}"
        cut = TENSOR_PARALLEL[name.partition(".")[2].partition(".")[2]]
        is_cut_twice = cut == Shard(0) and parts > 1
        expected = (Replicate(), StridedShard(0, split_factor=parts) if is_cut_twice else Shard(0), cut)
        assert tuple(parameter.placements) == expected, f"{name} is placed {parameter.placements}, not {expected}"
        assert parameter.shape == full[name].shape, f"{name} has the global shape {tuple(parameter.shape)}"
        left = [*full[name].shape]
        if isinstance(cut, Shard):
            left[cut.dim] = chunk(left[cut.dim], parts, part)
        left[0] = chunk(left[0], shards, shard)
        held = tuple(parameter.to_local().shape)
        assert held == tuple(left), f"rank {coordinate.rank} holds {held} of {name}, not {tuple(left)}"


#: How tensor parallelism places the parameters of a layer of an MLPStack.
TENSOR_PARALLEL: dict[str, Placement] = dict.fromkeys(("in_proj.weight", "in_proj.bias"), Shard(0))
TENSOR_PARALLEL |= {"out_proj.weight": Shard(1), "out_proj.bias": Replicate()}


def check_layout(
    shown: dict[str, nn.Parameter],
    full: dict[str, torch.Tensor],
    mesh: DeviceMesh,
    *,
    dims: dict[str, int],
    has_values: bool = True,
) -> None:
    """Check the DTensors of parameters: mesh, placements, shape, stride, dtype and the full tensor (collective).

    ``dims`` is the dimension along which each is cut. With ``has_values`` the full tensors are equal bit for bit.
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
            check_bits(name, parameter.full_tensor().detach(), expected.to(parameter.device))
