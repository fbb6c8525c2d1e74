"""Chapter COMPOSITION: sharding beside tensor, sequence and pipeline parallelism."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness import Capability, Hardware, contract, models, needs, world
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.dtensor import piece_of
from shardproof.harness.models.parallel import (
    Buffered,
    MLPStack,
    Projections,
    SplitTransformer,
    parallelize_mlps,
    parallelize_projections,
    parallelize_transformer,
    replicate,
)
from shardproof.harness.models.recomputation import recompute
from shardproof.harness.parity import Pair, Rank

pytestmark = needs(Capability.TENSOR_PARALLEL)

RECOMPUTES = pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=needs(Capability.RECOMPUTATION))])
FREES = needs(Capability.RESHARD_AFTER_FORWARD)
OFFLOAD = [
    None,
    pytest.param("pageable", marks=needs(Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD)),
    pytest.param("pinned", marks=needs(Capability.OFFLOAD, Hardware.ACCELERATOR)),
]
#: Two of something, one or two shards, and tensor parallelism over the rest.
SHAPES = pytest.mark.parametrize(
    "shape", [pytest.param((2, 1, 2), marks=needs(Capability.SINGLE_RANK)), (2, 2, 1)], ids=["2x1x2", "2x2x1"]
)


@contract("COMPOSITION-1")
@world(4)
@FREES
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@RECOMPUTES
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_two_dimensions(rank: Rank, dim: int, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """What tensor parallelism has cut is sharded again, and trains as DDP over the data-parallel ranks does."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    train(rank, mesh, dim=dim, recomputes=recomputes, reshard_after_forward=reshard_after_forward)


@contract("COMPOSITION-2")
@world(4, 8)
@FREES
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@RECOMPUTES
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_part_of_a_larger_mesh(rank: Rank, dim: int, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """The same within a mesh that has further dimensions: one stage of a pipeline, or on eight ranks two."""
    mesh = rank.mesh((rank.world_size // 4, 2, 2), ("pp", "dp", "tp"))
    train(rank, mesh, dim=dim, recomputes=recomputes, reshard_after_forward=reshard_after_forward)


@contract("COMPOSITION-2")
@world(4)
@pytest.mark.parametrize("dim", [3, 17])
@SHAPES
def test_two_halves_of_a_mesh(rank: Rank, shape: tuple[int, ...], dim: int) -> None:
    """Two stages of a pipeline shard on their own: neither waits for, nor adds to, the other."""
    train(rank, rank.mesh(shape, ("pp", "dp", "tp")), dim=dim, recomputes=False)


@contract("COMPOSITION-3")
@world(4)
@needs(Capability.HYBRID)
@pytest.mark.parametrize("dim", [3, 17])
@SHAPES
def test_replicas_of_tensor_parallel_shards(rank: Rank, shape: tuple[int, ...], dim: int) -> None:
    """A (replicate, shard) mesh beside a tensor-parallel one."""
    mesh = rank.mesh(shape, ("replicate", "shard", "tp"))
    train(rank, mesh, dim=dim, recomputes=False, data=("replicate", "shard"))


@contract("COMPOSITION-4")
@world(4)
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_transformer(rank: Rank, sequence: bool) -> None:
    """A transformer cut by heads and features, and along the sequence too, trains as DDP does."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = SplitTransformer()
    pair = rank.pair(
        model,
        units=model.units(),
        mesh=mesh["dp"],
        prepare=functools.partial(parallelize_transformer, mesh=mesh["tp"], sequence=sequence),
    )
    config = model.config
    for step in range(3):
        pair.step(rank.tokens(step, (3, config.length), vocabulary=config.vocabulary, mesh=mesh["dp"]))
        pair.check()


@contract("COMPOSITION-5")
@world(2, 4)
@FREES
@needs(Capability.TENSOR_PARALLEL_COUNTS, Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD, Capability.COUNTED_UNITS)
def test_offloaded_tensor_parallel(rank: Rank) -> None:
    """With one data-parallel rank only tensor parallelism communicates, also if the shards live on the CPU."""
    mesh = rank.mesh((1, rank.world_size), ("dp", "tp"))
    model = MLPStack(16)
    layers = len(model.layers)
    pair = rank.pair(
        model, units=model.units(), mesh=mesh["dp"], reshard_after_forward=True, offload="pageable",
        prepare=functools.partial(parallelize_mlps, mesh=mesh["tp"]),
    )  # fmt: skip
    for step in range(3):
        pair.step(rank.batch(step, (4, 16), mesh=mesh["dp"]))
        pair.check()
        pair.check_counts("forward", all_reduce=layers)
        # The first layer's input needs no gradient.
        pair.check_counts("backward", all_reduce=layers - 1)
        places = {parameter.device.type for parameter in pair.adapter.named_parameters().values()}
        assert places == {"cpu"}, f"parameters on {places}"


@contract("COMPOSITION-6")
@world(4)
@FREES
@pytest.mark.parametrize("flat_parameters", [False, pytest.param(True, marks=needs(Capability.FLAT_PARAMETERS))])
@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize("offload", OFFLOAD)
def test_parameters_of_both_kinds(
    rank: Rank, offload: Any, reshard_after_forward: bool | None, flat_parameters: bool
) -> None:
    """One unit has parameters that tensor parallelism cut and others whose gradients the script adds itself."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def add_plain(adapter: Adapter) -> None:
        for gradient in adapter.own_gradients(["net3.weight", "net3.bias"]):
            summed = gradient.to(rank.device)
            dist.all_reduce(summed, group=mesh["tp"].get_group())
            gradient.copy_(summed)

    pair = rank.pair(
        Projections(), mesh=mesh["dp"], prepare=functools.partial(parallelize_projections, mesh=mesh["tp"]),
        offload=offload, reshard_after_forward=reshard_after_forward, flat_parameters=flat_parameters,
        after_backward=add_plain,
    )  # fmt: skip
    for step in range(3):
        pair.step(rank.batch(step, (4, 5), mesh=mesh["dp"]), set_to_none=step % 2 == 0)
        pair.check()


@contract("COMPOSITION-7")
@world(4)
@needs(Capability.COUNTED_UNITS)
def test_collectives_of_both_dimensions(rank: Rank) -> None:
    """Beside tensor parallelism a unit is gathered once and reduced once, among the data-parallel ranks alone."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = Projections(normed=True)
    # Everything is cut or said to be replicated, so that no script has to add gradients.
    model.net3 = nn.Identity()
    pair = rank.pair(model, mesh=mesh["dp"], prepare=functools.partial(parallelize_projections, mesh=mesh["tp"]))
    for step in range(2):
        pair.step(rank.batch(step, (4, 5), mesh=mesh["dp"]))
        pair.check()
        counts = {name: counts_within(pair, mesh[name]) for name in ("dp", "tp")}
        assert counts["dp"] == {"forward all_gather": 1, "backward reduce_scatter": 1}, counts
        # The input of the first layer and the output; the gradient of the second's output.
        assert counts["tp"] == {
            "forward all_gather": 2,
            "forward reduce_scatter": 1,
            "backward all_gather": 1,
            "backward reduce_scatter": 1,
            "backward all_reduce": 1,
        }, counts


@contract("COMPOSITION-8")
@world(4)
@needs(Capability.SYNC_STATES)
def test_states_of_the_first_rank(rank: Rank) -> None:
    """Ranks that begin with values of their own take those of the first data-parallel rank, buffers too."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(rank.seeds.init + mesh["dp"].get_local_rank())
    model = Buffered(8).to(rank.device)
    own = {name: value.detach().cpu() for name, value in models.copy_of(model).state_dict().items()}
    everyone = rank.exchange(own)
    first, last = everyone[rank.index % 2], everyone[2 + rank.index % 2]
    assert not any(torch.equal(first[name], last[name]) for name in own), "nothing would have to be sent"
    run = rank.run(model, mesh=mesh["dp"], sync_states=True, prepare=functools.partial(replicate, mesh=mesh["tp"]))
    (buffer,) = run.adapter.module.buffers()
    found = {**run.adapter.parameters(), "offset": piece_of(buffer)}
    assert found.keys() == own.keys()
    wrong = [name for name, piece in found.items() if not torch.equal(piece.tensor.cpu(), piece.cut(first[name]))]
    by_rank = rank.exchange(wrong)
    assert not any(by_rank), f"not those of the first rank: {by_rank}"


def counts_within(pair: Pair, mesh: DeviceMesh) -> dict[str, int]:
    """How often the last step issued which collective in which phase, among the ranks of one dimension."""
    ranks = tuple(mesh.mesh.tolist())
    return dict(collections.Counter(f"{item.phase} {item.kind}" for item in pair.last_trace() if item.group == ranks))


def train(
    rank: Rank, mesh: DeviceMesh, *, dim: int, recomputes: bool, data: tuple[str, ...] = ("dp",), **options: Any
) -> None:
    """Three steps of an MLPStack, cut over ``mesh["tp"]`` and sharded over the dimensions ``data``."""
    model = MLPStack(dim)
    parallel = mesh[data if len(data) > 1 else data[0]]

    def prepare(plain: nn.Module) -> nn.Module:
        cut = parallelize_mlps(plain, mesh["tp"])
        return recompute(cut, "hooks") if recomputes else cut

    pair = rank.pair(
        model, units=model.units(), mesh=parallel, prepare=prepare,
        baseline="ddp" if len(data) == 1 else "replicated", **options,
    )  # fmt: skip
    for step in range(3):
        pair.step(rank.batch(step, (8, dim), mesh=parallel), set_to_none=step % 2 == 0)
        pair.check()
