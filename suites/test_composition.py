"""Chapter COMPOSITION: sharding beside tensor, sequence and pipeline parallelism."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness import Capability, contract, needs, seed, world
from harness.checkpointing import recompute
from harness.parallel_models import MLPStack, SplitTransformer, parallelize_mlps, parallelize_transformer
from harness.rank import Rank

pytestmark = needs(Capability.TENSOR_PARALLEL)

RECOMPUTES = pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=needs(Capability.RECOMPUTATION))])
FREES = needs(Capability.RESHARD_AFTER_FORWARD)
NOTE = "all sizes run, those that do not divide too; gradients and shards are compared"


@seed("test_fully_shard_training.py::test_train_parity_2d_mlp", note=NOTE)
@contract("COMPOSITION-1")
@world(4)
@FREES
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@RECOMPUTES
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_two_dimensions(rank: Rank, dim: int, recomputes: bool, reshard_after_forward: bool) -> None:
    """What tensor parallelism has cut is sharded again, and trains as DDP over the data-parallel ranks does."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    train(rank, mesh, dim=dim, recomputes=recomputes, reshard_after_forward=reshard_after_forward)


@seed("test_fully_shard_training.py::test_2d_mlp_with_nd_mesh", note=NOTE)
@contract("COMPOSITION-2")
@world(4, 8)
@FREES
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@RECOMPUTES
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_part_of_a_larger_mesh(rank: Rank, dim: int, recomputes: bool, reshard_after_forward: bool) -> None:
    """The same within a mesh that has further dimensions: one stage of a pipeline, or on eight ranks two."""
    mesh = rank.mesh((rank.world_size // 4, 2, 2), ("pp", "dp", "tp"))
    train(rank, mesh, dim=dim, recomputes=recomputes, reshard_after_forward=reshard_after_forward)


@contract("COMPOSITION-2")
@world(4)
@pytest.mark.parametrize("dim", [3, 17])
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)], ids=["2x1x2", "2x2x1"])
def test_two_halves_of_a_mesh(rank: Rank, shape: tuple[int, ...], dim: int) -> None:
    """Two stages of a pipeline shard on their own: neither waits for, nor adds to, the other."""
    train(rank, rank.mesh(shape, ("pp", "dp", "tp")), dim=dim, recomputes=False)


@contract("COMPOSITION-3")
@world(4)
@needs(Capability.HYBRID)
@pytest.mark.parametrize("dim", [3, 17])
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)], ids=["2x1x2", "2x2x1"])
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


@seed(
    "test_fully_shard_training.py::test_tp_with_fsdp_offloading",
    note="a group of one neither gathers nor reduces any more; the baseline runs its backward",
)
@contract("COMPOSITION-5")
@world(2, 4)
@FREES
@needs(Capability.TENSOR_PARALLEL_COUNTS, Capability.OFFLOAD, Capability.COUNTED_UNITS)
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
