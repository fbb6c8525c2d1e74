"""The layout of a tensor says which elements the local tensor really holds, as torch itself has cut it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from shardproof.harness.simulation.world import simulated_world
from shardproof.harness.tensors.fingerprints import Box, digest
from shardproof.harness.tensors.layouts import Layout, layout_of
from shardproof.trainers import megatron


@contextlib.contextmanager
def mesh_of(rank):
    """A mesh of 2 x 2 ranks as one of them sees it; nothing is communicated."""
    with simulated_world(4, rank=rank) as world:
        yield world.mesh((2, 2), ("dp", "tp"))


def held(full, box):
    """The elements of a box, in the shape of a rank's local tensor."""
    if box.dims is None:
        return full
    for dim, spans in enumerate(box.dims):
        places = [torch.arange(start, stop) for start, stop in spans]
        full = full.index_select(dim, torch.cat(places) if places else torch.arange(0))
    return full


def assert_says_what_is_held(tensor, full):
    box, local = layout_of(tensor).box, tensor.to_local()
    assert box.shape == tuple(full.shape)
    assert box.numel == local.numel()
    assert not box.numel or torch.equal(local, held(full, box))  # of size (0, 0) where FSDP2 cuts nothing into halves


PLACEMENTS = [
    (Replicate(), Replicate()), (Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)),
    (Shard(1), Shard(0)), (Shard(0), Shard(0)),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (9, 2), (3, 1), (1, 6), (0, 4), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_layouts_of_shards(shape, placements):
    full, total = torch.randn(shape), 0
    for rank in range(4):
        with mesh_of(rank) as mesh:
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            assert_says_what_is_held(tensor, full)
            layout = layout_of(tensor)
            assert (layout.pending, layout.mesh) == ((), (0, 1, 2, 3))
            total += digest(tensor.to_local(), layout.box).numbers
    copies = 2 ** sum(isinstance(one, Replicate) for one in placements)
    torch.testing.assert_close(total, copies * digest(full).numbers, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [8, 9, 3, 1])
def test_layouts_of_strided_shards(size):
    """FSDP2 over tensor parallelism: the columns' parts are cut first, so that a rank's rows are apart."""
    rows = []
    for rank in range(4):
        with mesh_of(rank) as mesh:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 5))
            full = {name: value.detach().clone() for name, value in model.named_parameters()}
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
            fully_shard(model, mesh=mesh["dp"])
            assert isinstance(model[0].weight.placements[0], _StridedShard)
            for name, parameter in model.named_parameters():
                assert_says_what_is_held(parameter, full[name])
            rows += held(torch.arange(size), layout_of(model[0].bias).box).tolist()
    assert sorted(rows) == list(range(size))


ROWS = (((3, 5),), ((0, 2),))
PENDING = [
    ((Partial(), Replicate()), (1, 3), None), ((Replicate(), Partial()), (2, 3), None),
    ((Partial(), Partial()), (0, 1, 2, 3), None), ((Partial(), Shard(0)), (1, 3), ROWS),
    ((Shard(0), Partial("avg")), (2, 3), ROWS),
]  # fmt: skip


@pytest.mark.parametrize(("placements", "pending", "dims"), PENDING, ids=str)
def test_sums_that_are_pending(placements, pending, dims):
    with mesh_of(3) as mesh:
        local = torch.ones(2 if dims else 5, 2)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([5, 2]), stride=(2, 1))
        layout = layout_of(tensor)
    assert (layout.pending, layout.box) == (pending, Box((5, 2), dims))


def test_plain_tensors():
    assert layout_of(torch.zeros(3, 2)) == Layout(Box((3, 2)))


@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (1, 1), (0, 2)])
def test_layouts_of_megatron(dim, stride):
    """A rank has every size-th of size x stride parts, as Megatron cuts a gated linear layer."""
    full = torch.arange(8 * 4).reshape(8, 4)
    for rank in (2, 3):
        with mesh_of(rank) as mesh:
            group = mesh["tp"].get_group()
            model = nn.Linear(4, 8)
            model.weight = nn.Parameter(torch.cat(full.float().chunk(2 * stride, dim)[rank % 2 :: 2], dim))
            vars(model.weight).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)
            layout = megatron.layout(model, group)
            found = layout("weight", model.weight.detach())
            assert found.mesh == (2, 3) and held(full, found.box).equal(model.weight.long())
            assert layout("bias", model.bias) is None
