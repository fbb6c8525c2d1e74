"""Chapter COMPOSITION: sharding together with tensor, sequence and pipeline parallelism."""

import collections
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from shardproof.testing import Capability, Hardware, Pair, Rank, contract, models, needs, world
from shardproof.testing.axes import RESHARD, RESHARD_CHOICES, subjects, with_first
from shardproof.testing.compare import (
    Piece,
    backward_of_copies,
    check_bits,
    check_gradients,
    check_parameters,
    piece_of,
    step_label,
)
from shardproof.testing.make import (
    Adapter,
    NamedDimensions,
    cut_over,
    pair_by_units,
    pair_of_mlps,
    run_and_plain,
    run_by_units,
    sharded,
)
from shardproof.testing.measure import private
from shardproof.testing.refuse import Refusal, error_of_all
from shardproof.testing.train import (
    Computations,
    batches,
    checked_steps,
    optim,
    parallel,
    recompute,
    tokens,
    train_and_check,
)


class Buffered(nn.Module):
    """Adds a (dim, dim) parameter and a (dim, dim) buffer to the input. Input and output: (dim, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight + self.offset


pytestmark = [needs(Capability.TENSOR_PARALLEL), world(4)]

BY_HAND = needs(Capability.MANUAL_BACKWARD_FINALIZATION)
RECOMPUTED = needs(Capability.RECOMPUTATION)
#: Recomputed or not, what happens after forward.
WAYS = pytest.mark.parametrize(
    ("recomputes", "reshard_after_forward"),
    [
        *with_first(False, RESHARD[:3]),
        *(pytest.param(True, *item.values, marks=[*item.marks, RECOMPUTED]) for item in RESHARD_CHOICES),
    ],
)
OFFLOAD = [
    None,
    pytest.param("pageable", marks=needs(Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD)),
    pytest.param("pinned", marks=needs(Capability.OFFLOAD, Hardware.ACCELERATOR)),
]
#: Two stages or replicas, one or two shards, and tensor parallelism over the rest.
SHAPES = pytest.mark.parametrize(
    "shape", [pytest.param((2, 1, 2), marks=needs(Capability.SINGLE_RANK)), (2, 2, 1)], ids=["2x1x2", "2x2x1"]
)


@contract("COMPOSITION-1")
@WAYS
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_two_dimensions(rank: Rank, dim: int, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """Tensor-parallel parameters are sharded again, and train as DDP over the data-parallel ranks does."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    train(rank, mesh, dim=dim, recomputes=recomputes, reshard_after_forward=reshard_after_forward)


@contract("COMPOSITION-1")
def test_pending_sums_of_a_cut_parameter(rank: Rank) -> None:
    """A cut parameter, of whose gradient each tensor-parallel rank has a part for all elements, trains as DDP does."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    pair = rank.pair(parallel.Factors(9), **cut_over(mesh, parallel.cut_factors))
    train_and_check(pair, batches(rank, 2, (4, 9), mesh=mesh["dp"]))


@contract("COMPOSITION-1")
def test_pending_sums_that_a_model_declares(rank: Rank) -> None:
    """A full parameter, of whose gradient a tensor-parallel rank declares that it has a part, trains as DDP does."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    pair = rank.pair(parallel.Factors(9), **cut_over(mesh, parallel.cut_factors, replicated=True))
    train_and_check(pair, batches(rank, 2, (4, 9), mesh=mesh["dp"]))


@contract("COMPOSITION-2")
@world(8)
@WAYS
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_part_of_a_larger_mesh(rank: Rank, dim: int, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """Two-dimensional sharding trains within each stage of a pipeline of two, with values and data of their own."""
    mesh = rank.mesh((2, 2, 2), ("pp", "dp", "tp"))
    train(rank, mesh, dim=dim, recomputes=recomputes, reshard_after_forward=reshard_after_forward)


@contract("COMPOSITION-2")
@pytest.mark.parametrize("dim", [3, 17])
@SHAPES
def test_two_halves_of_a_mesh(rank: Rank, shape: tuple[int, ...], dim: int) -> None:
    """Two stages of a pipeline, with values and data of their own, share no collective."""
    train(rank, rank.mesh(shape, ("pp", "dp", "tp")), dim=dim, recomputes=False)


@contract("COMPOSITION-3", "COMPOSITION-11")
@pytest.mark.parametrize("joined", [pytest.param(False, marks=needs(Capability.HYBRID)), True])
@pytest.mark.parametrize("dim", [3, 17])
@SHAPES
def test_replicas_of_tensor_parallel_shards(rank: Rank, shape: tuple[int, ...], dim: int, joined: bool) -> None:
    """A (replicate, shard) mesh with a tensor-parallel one; or both flattened into one, as for data and context."""
    names = ("replicate", "shard")
    mesh = rank.mesh(shape, (*names, "tp"), joined=names if joined else ())
    train(rank, mesh, dim=dim, recomputes=False, data=("_".join(names),) if joined else names)


@contract("COMPOSITION-14")
@world(4, 8)
@needs(Capability.REGISTERED_STATE)
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_layout_of_two_dimensions(rank: Rank, dim: int) -> None:
    """DTensor parameters lie on the mesh (dp, tp), placed as documented, and together are the full tensors."""
    names = ("dp", "tp") if rank.world_size == 4 else ("pp", "dp", "tp")
    mesh = rank.mesh((2,) * len(names), names)
    model = parallel.MLPStack(dim)
    full = {name: value.detach().clone().to(rank.device) for name, value in model.named_parameters()}
    run = run_by_units(rank, model, **cut_over(mesh, parallel.parallelize_mlps))
    for step in range(2):
        for name, parameter in run.adapter.named_parameters().items():
            if not isinstance(parameter, DTensor):
                # The layout of plain tensors is the implementation's own.
                kinds = rank.implementation.capabilities()
                assert Capability.DTENSOR_PARAMETERS not in kinds, f"{name} is no DTensor after {step} steps"
                continue
            assert parameter.device_mesh.mesh_dim_names == ("dp", "tp"), f"{name} is on {parameter.device_mesh}"
            found, expected = tuple(parameter.placements), PLACEMENTS[name.partition(".")[2].partition(".")[2]]()
            assert found == expected, f"{name} is placed {found} instead of {expected} after {step} steps"
            assert parameter.shape == full[name].shape, f"{name} has the global shape {tuple(parameter.shape)}"
            whole: torch.Tensor = parameter.full_tensor()
            if step == 0:
                assert torch.equal(whole, full[name]), f"the shards of {name} are put together in another order"
        run.step([(rank.batch(step, (4, dim), mesh=mesh["dp"]),)], loss=models.mean_square)


#: Placements of a layer's parameters on the mesh (dp, tp). A strided shard cuts a dimension that TP has already cut.
PLACEMENTS: dict[str, Callable[[], tuple[Placement, ...]]] = {
    "in_proj.weight": lambda: (strided(), Shard(0)),
    "in_proj.bias": lambda: (strided(), Shard(0)),
    "out_proj.weight": lambda: (Shard(0), Shard(1)),
    "out_proj.bias": lambda: (Shard(0), Replicate()),
}


def strided() -> Placement:
    """Return the placement of a parameter that tensor parallelism has cut in two along the same dimension."""
    placement: Placement = private.need("torch.distributed.tensor.placement_types._StridedShard")(0, split_factor=2)
    return placement


@contract("COMPOSITION-16")
@needs(Capability.RESHARD_TO_SIZE)
def test_tensor_parallel_groups_of_ranks(rank: Rank) -> None:
    """Resharded to a subgroup, tensor-parallel parameters are refused by name before a send, or train as DDP does."""
    mesh = rank.mesh((4, 1), ("dp", "tp"))
    model = parallel.MLPStack(5)
    cut = parallel.parallelize_mlps(models.copy_of(model).to(rank.device), mesh["tp"])
    # The root's is the only unit: no other one could be refused.
    options: Any = {"mesh": mesh["dp"], "reshard_after_forward": 2}
    adapter = sharded(rank, cut, **options)
    refusal = Refusal(rank, lambda: adapter.forward(rank.batch(0, (4, 5))))
    if refusal.text is not None:
        refusal.check_names("eshard")
        return
    pair = rank.pair(model, prepare=functools.partial(parallel.parallelize_mlps, mesh=mesh["tp"]), **options)
    train_and_check(pair, batches(rank, 1, (4, 5)))


@dataclasses.dataclass(frozen=True)
class OneMesh:
    """One mesh of all dimensions, some of which are data parallel."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    shard: tuple[str, ...]  # over which parameters are sharded
    replicate: tuple[str, ...]  # over which they are replicated
    axes: tuple[str, ...]  # on which they then lie; several data-parallel ones of a kind are flattened into one
    weight: Callable[[], tuple[Placement, ...]]  # of the first projection, on the axes

    def data_parallel(self, mesh: DeviceMesh) -> DeviceMesh:
        """The data-parallel part of ``mesh``."""
        names = (*self.replicate, *self.shard)
        if max(len(self.shard), len(self.replicate)) > 1:
            return mesh[names]._flatten("_".join(names))
        return mesh[names if len(names) > 1 else names[0]]


REPLICAS, TWO = ("copy", "dp"), ("one", "two")
ONE_MESH = {
    "shard-tp": OneMesh((2, 2), ("dp", "tp"), ("dp",), (), ("dp", "tp"), lambda: (strided(), Shard(0))),
    "tp-shard": OneMesh((2, 2), ("tp", "dp"), ("dp",), (), ("tp", "dp"), lambda: (Shard(0), Shard(0))),
    "replicate-tp": OneMesh((2, 2), ("dp", "tp"), (), ("dp",), ("dp", "tp"), lambda: (Replicate(), Shard(0))),
    "replicate-shard": OneMesh((2, 2), REPLICAS, ("dp",), ("copy",), REPLICAS, lambda: (Replicate(), Shard(0))),
    "two-replicas": OneMesh((2, 2), TWO, (), TWO, ("one_two",), lambda: (Replicate(),)),
    "two-shards": OneMesh((2, 2), TWO, TWO, (), ("one_two",), lambda: (Shard(0),)),
    "two-shards-tp": OneMesh((1, 2, 2), (*TWO, "tp"), TWO, (), ("one_two", "tp"), lambda: (strided(), Shard(0))),
}


@contract("COMPOSITION-15")
@needs("dp_mesh_dims")
@pytest.mark.parametrize("divides", [False, True], ids=["equal", "divided"])
@subjects(
    "dimensions",
    [
        pytest.param(name, marks=needs(Capability.SHARDED, Capability.REGISTERED_STATE)) if one.shard else name
        for name, one in ONE_MESH.items()
    ],
)
def test_named_dimensions(rank: Rank, dimensions: str, divides: bool) -> None:
    """Parameters on one mesh, sharded over the dimensions that user code names, lie on it and train as DDP does."""
    case = ONE_MESH[dimensions]
    mesh = rank.mesh(case.shape, case.names)
    model, data = parallel.MLPStack(5), case.data_parallel(mesh)
    full = {name: value.detach().clone().to(rank.device) for name, value in model.named_parameters()}
    divided = (*case.replicate, *case.shard) if divides else ()
    options: Any = {"mesh": data, "prepare": functools.partial(parallel.spread_mlps, mesh=mesh, divides=divided)}
    options |= {"baseline": "ddp" if data.ndim == 1 else "replicated", "shards": bool(case.shard)}
    named = NamedDimensions(mesh, case.shard, case.replicate)
    pair = pair_by_units(rank, model, dp_mesh_dims=named, **options)
    for name, parameter in pair.adapter.named_parameters().items():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter)}"
        axes, found = parameter.device_mesh.mesh_dim_names, tuple(parameter.placements)
        if axes == case.names and set(found) == {Replicate()}:
            axes, found = case.axes, (Replicate(),) * len(case.axes)  # uncut tensors may stay on the given mesh
        size = parameter.device_mesh.size()
        assert (axes, size) == (case.axes, rank.world_size), f"{name} is on {parameter.device_mesh}"
        assert not name.endswith("in_proj.weight") or found == case.weight(), f"{name} is placed {found}"
        whole: torch.Tensor = parameter.full_tensor()
        assert torch.equal(whole, full[name]), f"the shards of {name} are put together in another order"
    train_and_check(pair, batches(rank, 3, (4, 5), mesh=data), set_to_none="even")


@contract("COMPOSITION-19")
@world(4)
@needs("dp_mesh_dims", Capability.SPMD_TYPES)
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids=["shard-tp", "tp-shard"])
def test_plain_parameters_with_types(rank: Rank, names: tuple[str, ...]) -> None:
    """Plain parameters that are annotated with their types on one mesh train as DDP does, with the types in forward."""
    mesh, spmd = rank.mesh((2, 2), names), importlib.import_module("spmd_types")
    types: list[Any] = []

    def note(module: nn.Module, _: Any = None) -> nn.Module:
        types.append([(spmd.get_local_type(one), spmd.get_partition_spec(one)) for one in module.parameters()])
        return module

    options: Any = {"mesh": mesh["dp"], "dp_mesh_dims": NamedDimensions(mesh, ("dp",))}
    pair = pair_by_units(
        rank, parallel.MLPStack(6), prepare=lambda plain: note(parallel.annotate_mlps(plain, mesh)), **options
    )
    train_and_check(pair, batches(rank, 3, (4, 6), mesh=mesh["dp"]), set_to_none="even")
    layers: Any = pair.adapter.module.get_submodule("layers")
    for layer in layers:
        for linear in (layer.in_proj, layer.out_proj):
            linear.register_forward_pre_hook(lambda module, _: note(module) and None)
    with importlib.import_module("spmd_types.checker").typecheck("permissive"):  # torch restores types only here
        pair.adapter.forward(rank.batch(3, (4, 6), mesh=mesh["dp"]))
    assert [one for linear in types[1:] for one in linear] == types[0]


def _factors(rank: Rank, what: str) -> tuple[nn.Module, NamedDimensions]:
    """Return a model of one parameter, and dimensions to shard it over, with one mistake (collective)."""
    mesh, model = rank.mesh((rank.world_size, 1), ("dp", "tp")), parallel.Factors(9).to(rank.device)
    on = rank.mesh() if what == "on-another-mesh" else mesh
    placements: list[Placement] = [Shard(0) if what == "cut-already" else Replicate(), Replicate()]
    if what != "a-plain-tensor":
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), on, placements[: on.ndim]))
    names = {"an-unknown-name": ("cp",), "no-name": ()}.get(what, ("dp",))
    return model, NamedDimensions(mesh, names)


#: The mistakes, each with words one of which is in the error.
WRONG_DIMENSIONS = {
    "a-plain-tensor": ("weight",),
    "on-another-mesh": ("weight", "mesh"),
    "cut-already": ("weight", "dp"),
    "an-unknown-name": ("cp",),
    "no-name": ("DataParallelMeshDims",),
}


@contract("COMPOSITION-15")
@world(2)
@needs("dp_mesh_dims", Capability.SHARDED)
@subjects("what", WRONG_DIMENSIONS)
def test_wrong_dimensions(rank: Rank, what: str) -> None:
    """Parameters that do not lie on the mesh, or are cut over the named dimensions, and unknown names are refused."""
    model, named = _factors(rank, what)
    options: Any = {"mesh": named.mesh["dp"], "dp_mesh_dims": named}
    Refusal(rank, lambda: sharded(rank, model, **options)).check_names(*WRONG_DIMENSIONS[what])


@contract("COMPOSITION-15")
@needs("dp_mesh_dims", Capability.SHARDED)
def test_named_replicas_in_different_orders(rank: Rank) -> None:
    """On a mesh whose replicas have their ranks in different orders, the dimensions are refused, or train as DDP."""
    mesh = rank.mesh((2, 2), ("copy", "dp"), order=(3, 1, 0, 2))
    options: Any = {"mesh": mesh, "dp_mesh_dims": NamedDimensions(mesh, ("dp",), ("copy",))}
    model, spread = parallel.MLPStack(5).to(rank.device), functools.partial(parallel.spread_mlps, mesh=mesh)
    tried = spread(models.copy_of(model))
    refusal = Refusal(rank, lambda: sharded(rank, tried, **options), may_send=True)  # ranks may compare orders
    if refusal.text is not None:
        refusal.check_names("mesh")
        return
    pair = rank.pair(model, prepare=spread, baseline="replicated", **options)
    train_and_check(pair, batches(rank, 2, (4, 5)))


@contract("COMPOSITION-4")
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_transformer(rank: Rank, sequence: bool) -> None:
    """A transformer cut by heads and features, and along the sequence too, trains as DDP does."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = parallel.SplitTransformer()
    pair = pair_by_units(rank, model, **cut_over(mesh, parallel.parallelize_transformer, sequence=sequence))
    config = model.config
    for _ in checked_steps(pair, tokens(rank, 3, (3, config.length), vocabulary=config.vocabulary, mesh=mesh["dp"])):
        check_groups(pair, mesh["dp"], mesh["tp"])
        check_replicas(rank, pair, mesh["tp"])


@contract("COMPOSITION-5")
@world(2, 4)
@needs(Capability.TENSOR_PARALLEL_COUNTS)
@pytest.mark.parametrize("offload", OFFLOAD)
def test_offloaded_tensor_parallel(rank: Rank, offload: Any) -> None:
    """With one data-parallel rank only tensor parallelism communicates, also if the shards are on the CPU."""
    mesh = rank.mesh((1, rank.world_size), ("dp", "tp"))
    model = parallel.MLPStack(16)
    layers = len(model.layers)
    pair = pair_of_mlps(rank, mesh, model, offload=offload)
    for _ in checked_steps(pair, batches(rank, 3, (4, 16), mesh=mesh["dp"])):
        pair.check_counts("forward", all_reduce=layers)
        # The first layer's input needs no gradient.
        pair.check_counts("backward", all_reduce=layers - 1)
        pair.check_counts("step")
        places = {parameter.device.type for parameter in pair.adapter.named_parameters().values()}
        assert places == {"cpu" if offload else rank.device.type}, f"parameters on {places}"


@contract("COMPOSITION-6")
@pytest.mark.parametrize("flat_parameters", [False, pytest.param(True, marks=needs("flat_parameters"))])
@pytest.mark.parametrize("reshard_after_forward", [RESHARD[0], RESHARD_CHOICES[1]])
@pytest.mark.parametrize("offload", OFFLOAD)
def test_parameters_of_both_kinds(
    rank: Rank, offload: Any, reshard_after_forward: bool | None, flat_parameters: bool
) -> None:
    """One unit has tensor-parallel parameters and others whose gradients user code sums itself."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def add_plain(adapter: Adapter) -> None:
        for gradient in adapter.own_gradients(["net3.weight", "net3.bias"]):
            summed = gradient.to(rank.device)
            dist.all_reduce(summed, group=mesh["tp"].get_group())
            gradient.copy_(summed)

    options = cut_over(mesh, parallel.parallelize_projections)
    options |= {"reshard_after_forward": reshard_after_forward, "flat_parameters": flat_parameters}
    pair = rank.pair(parallel.Projections(), offload=offload, after_backward=add_plain, **options)
    train_and_check(pair, batches(rank, 3, (4, 5), mesh=mesh["dp"]), set_to_none="even")


@contract("COMPOSITION-7")
@needs(Capability.COUNTED_UNITS)
def test_collectives_of_both_dimensions(rank: Rank) -> None:
    """With tensor parallelism a unit is gathered once and reduced once, among the data-parallel ranks alone.

    A step has seven collectives in all: there is none on any other group.
    """
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = parallel.Projections(normed=True)
    # Everything is cut or a replicated DTensor, so that user code need not sum gradients.
    model.net3 = nn.Identity()
    pair = rank.pair(model, **cut_over(mesh, parallel.parallelize_projections))
    for _ in checked_steps(pair, batches(rank, 2, (4, 5), mesh=mesh["dp"])):
        check_groups(pair, mesh["dp"], mesh["tp"])
        counts = {name: counts_within(pair, mesh[name]) for name in ("dp", "tp")}
        assert counts["dp"] == {"forward all_gather": 1, "backward reduce_scatter": 1}, counts
        # The input of the first layer and the output; the gradient of the second's output.
        in_forward = {"forward all_gather": 2, "forward reduce_scatter": 1}
        in_backward = {"backward all_gather": 1, "backward reduce_scatter": 1, "backward all_reduce": 1}
        assert counts["tp"] == in_forward | in_backward, counts
        check_replicas(rank, pair, mesh["tp"])


@contract("COMPOSITION-8")
@needs("sync_module_states")
def test_states_of_the_first_rank(rank: Rank) -> None:
    """Ranks that begin with values of their own take those of the first data-parallel rank, buffers too."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(rank.seeds.init + mesh["dp"].get_local_rank())
    model = Buffered(8).to(rank.device)
    own = {name: value.detach().cpu() for name, value in models.copy_of(model).state_dict().items()}
    first, last = rank.exchange(own)[rank.index % 2 :: 2]
    assert not any(torch.equal(first[name], last[name]) for name in own), "nothing would have to be sent"
    run = rank.run(model, sync_module_states=True, **cut_over(mesh, parallel.replicate))
    (buffer,) = run.adapter.module.buffers()
    check_values(rank, {**run.adapter.parameters(), "offset": piece_of(buffer)}, first)


def check_values(rank: Rank, found: dict[str, Piece], first: dict[str, torch.Tensor]) -> None:
    """Check that a rank's pieces have the values of the first rank (collective)."""
    assert found.keys() == first.keys()
    wrong = [name for name, piece in found.items() if not torch.equal(piece.tensor.cpu(), piece.cut(first[name]))]
    by_rank = rank.exchange(wrong)
    assert not any(by_rank), f"not those of the first rank: {by_rank}"


@contract("COMPOSITION-8")
@needs("sync_module_states")
@pytest.mark.parametrize("replicas", [False, pytest.param(True, marks=needs(Capability.HYBRID))])
def test_states_of_the_first_rank_everywhere(rank: Rank, replicas: bool) -> None:
    """Uneven plain parameters and buffers of any dtype, transposed or unsaved, take the first rank's values."""
    mesh = rank.mesh((2, 2), ("replicate", "shard")) if replicas else rank.mesh()
    torch.manual_seed(rank.seeds.init + rank.index)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 7)).to(rank.device)
    model[0].register_buffer("columns", torch.zeros(4, 6, device=rank.device)[:, ::2])  # with gaps in memory
    model[1].register_buffer("turned", torch.zeros(6, 4, device=rank.device).t())
    model[2].register_buffer("unsaved", torch.zeros(3, dtype=torch.float64, device=rank.device), persistent=False)
    model.register_buffer("of_the_root", torch.zeros(2, dtype=torch.bfloat16, device=rank.device), persistent=False)
    for number, buffer in enumerate(model.buffers(), start=1):
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) + 100 * number + rank.index)
    buffers = [name for name, _ in model.named_buffers()]
    mine = {name: value.detach().cpu().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    first = rank.exchange(mine)[0]
    run = rank.run(model, units=[["0"], ["1"]], mesh=mesh, sync_module_states=True)
    shown = map(piece_of, run.adapter.module.buffers())
    check_values(rank, {**run.adapter.parameters(), **dict(zip(buffers, shown, strict=True))}, first)


def counts_within(pair: Pair, mesh: DeviceMesh) -> dict[str, int]:
    """How often the last step issued which collective in which phase, among the ranks of one dimension."""
    ranks = tuple(mesh.mesh.tolist())
    return dict(collections.Counter(f"{item.phase} {item.kind}" for item in pair.last_trace() if item.group == ranks))


def check_groups(pair: Pair, *dimensions: DeviceMesh) -> None:
    """The last step issued collectives among the ranks of one of these dimensions at a time, and among no others."""
    known = {tuple(mesh.mesh.tolist()) for mesh in dimensions}
    stray = [str(item) for item in pair.last_trace() if item.group not in known]
    assert not stray, f"collectives on groups other than {sorted(known)}: {stray}"


def check_replicas(rank: Rank, pair: Pair, mesh: DeviceMesh) -> None:
    """Tensors that the ranks of a tensor-parallel dimension share have the same bits on all of them (collective)."""
    named = pair.adapter.named_parameters()
    shared = {
        name: parameter.to_local().detach().cpu()
        for name, parameter in named.items()
        if isinstance(parameter, DTensor) and parameter.placements[-1] == Replicate()
    }
    everyone = rank.exchange(shared)
    for other in mesh.mesh.tolist():
        wrong = [name for name, value in shared.items() if not torch.equal(value, everyone[other][name])]
        assert not wrong, f"ranks {rank.index} and {other} hold different bits of {wrong}"


def train(
    rank: Rank, mesh: DeviceMesh, *, dim: int, recomputes: bool, data: tuple[str, ...] = ("dp",), **options: Any
) -> None:
    """Three steps of MLPs cut over ``mesh["tp"]`` and sharded over ``data``; stages over "pp" have their own data."""
    names = mesh.mesh_dim_names or ()
    stage = mesh["pp"].get_local_rank() if "pp" in names else 0
    torch.manual_seed(rank.seeds.init + stage)
    model = parallel.MLPStack(dim)
    replicas = mesh[data if len(data) > 1 else data[0]]
    computations = Computations(inside="in_proj")

    def prepare(plain: nn.Module) -> nn.Module:
        computations.watch(plain)
        cut = parallel.parallelize_mlps(plain, mesh["tp"])
        return recompute(cut, "hooks") if recomputes else cut

    pair = pair_by_units(
        rank, model, mesh=replicas, prepare=prepare, baseline="ddp" if len(data) == 1 else "replicated", **options
    )
    for step in range(3):
        batch = rank.batch(step, (8, dim), mesh=replicas, microbatch=stage)
        pair.step(batch, before_loss=computations.before_loss, set_to_none=step % 2 == 0)
        if recomputes:
            computations.check()
        pair.check()
        check_groups(pair, *(mesh[name] for name in (*data, "tp")))


@contract("COMPOSITION-13")
@world(2)
@needs(Capability.AUTOGRAD_CALLS, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("frees", [True, False], ids=["critic-kept", "generator-kept"])
def test_generator_and_critic(rank: Rank, frees: bool) -> None:
    """Two models of one process that train in turn, one through the other, train as plain copies do."""
    generator, critic = models.Tower(dim=9), models.Tower(dim=9, depth=2)
    plain = [models.copy_of(one).to(rank.device) for one in (generator, critic)]
    optimizers = [optim.sgd(lr=0.05)(one.parameters()) for one in plain]
    both_runs = ((generator, True), (critic, False))
    options: Any = {"optimizer": optim.sgd(lr=0.05)}
    runs = [run_by_units(rank, one, reshard_after_forward=keeps == frees, **options) for one, keeps in both_runs]
    sharded = [run.adapter.forward for run in runs]
    for step in range(3):
        noise, real = (rank.batch(step, (4, 9), microbatch=number) for number in range(2))

        def losses(make: Any, judge: Any, noise: torch.Tensor = noise, real: torch.Tensor = real) -> Iterator[Any]:
            with torch.no_grad():
                fake = make(noise)
            yield models.mean_square(judge(real)) - models.mean_square(judge(fake))
            yield models.mean_square(judge(make(noise)))

        both = losses(sharded[0], sharded[1]), losses(plain[0], plain[1])
        for trained in (1, 0):  # the critic, then the generator through it
            with runs[0].recorder.during("backward"):
                next(both[0]).backward()
            backward_of_copies(rank, *plain, loss=next(both[1]))
            for run, copy in zip(runs, plain, strict=True):
                check_gradients(run, copy, step=step)
            runs[trained].adapter.step()
            optimizers[trained].step()
            for run, copy in zip(runs, plain, strict=True):
                check_parameters(run, copy, step=step)
                run.adapter.zero_grad(set_to_none=True)
                copy.zero_grad()


@contract("COMPOSITION-18")
@world(2)
@needs(Capability.SHARE_COMM_CTX, Capability.AUTOGRAD_CALLS, Capability.RECOVERY)
@subjects("order", ["in-turn", "first-backward", "last-backward", "reset", pytest.param("pending", marks=BY_HAND)])
def test_roots_of_one_context(rank: Rank, order: str) -> None:
    """Two models that share streams and buffers train as each alone does, in whatever order and with a reset of one.

    While a reduction of the one is pending, the other may be refused, and touches nothing.
    """
    (run, plain), (other, its) = (run_and_plain(rank, models.Tower(dim=9)) for _ in range(2))
    type(run.adapter).share_comm_ctx([run.adapter.module, other.adapter.module])
    root: Any = run.adapter.module
    for step in range(2):
        x, y = (rank.batch(step, (4, 9), microbatch=number) for number in range(2))
        for copy, batch in ((plain, x), (its, y)):
            backward_of_copies(rank, copy, loss=models.mean_square(copy(batch)))
        if order == "pending":
            root.set_manual_backward_finalization(True)
        first = models.mean_square(run.adapter.forward(x))
        second = models.mean_square(other.adapter.forward(y)) if order not in ("in-turn", "pending") else None
        if order == "last-backward" and second is not None:
            other.adapter.backward(second)
        if order == "reset":
            other.adapter.recover()
        run.adapter.backward(first)
        if order == "pending":
            handle = root.finalize_backward(async_op=True)
            for attempt in (lambda: other.adapter.forward(y), other.adapter.recover):  # noqa: B023
                error_of_all(rank, attempt)
            handle.wait()
        check_gradients(run, plain, step=step)
        if order == "first-backward" and second is not None:
            other.adapter.backward(second)
        elif order != "last-backward":
            other.adapter.backward(models.mean_square(other.adapter.forward(y)))
        for one, copy in ((run, plain), (other, its)):
            missing = [name for name, gradient in one.adapter.gradients().items() if gradient is None]
            assert not missing, f"no gradients in {step_label(step)}: {missing}"
            check_gradients(one, copy, step=step)
            one.adapter.zero_grad(set_to_none=True)
            copy.zero_grad()


@contract("COMPOSITION-13")
@needs(Capability.HYBRID, Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_teacher_and_student(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A frozen teacher on another mesh, of another dtype and other units, changes no training, also when nested.

    The teacher runs before each step, between two units of the student's forward, and between backward and step.
    """
    teacher, student = models.Tower(dim=9, depth=2), Distilled(dim=9)
    plain = models.copy_of(teacher).double().to(rank.device)
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    teaching = rank.run(teacher.requires_grad_(False), units=[["layers.1"]], mesh=mesh, cast=torch.float64)

    def teach(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), teaching.recorder.during("teacher"):
            found = teaching.adapter.forward(x.double())
            expected = plain(x.double())
        check_bits("output of the teacher", found, expected, sides="sharded, plain")
        target: torch.Tensor = found.float()
        return target

    def again() -> None:
        teach(rank.batch(0, (4, 9), microbatch=1))

    options: Any = {"after_backward": lambda adapter: again()}
    pair = pair_by_units(rank, student, reshard_after_forward=reshard_after_forward, **options)
    pair.sharded.original_module("layers.1").register_forward_hook(lambda module, args, output: again())
    train_and_check(pair, ((x, teach(x)) for x in batches(rank, 3, (4, 9))))


class Distilled(models.Tower):
    """Takes a batch and a teacher's output; returns the difference between its own output and the teacher's."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) - target
