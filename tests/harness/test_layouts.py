"""The layout of a tensor says which elements the local tensor really holds, as torch itself has cut it."""

from __future__ import annotations

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
from shardproof.harness.tensors.layouts import layout_of, span_text


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
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
]


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (9, 2), (3, 1), (1, 6), (0, 4)], ids=str)
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


def test_spans_of_strided_shards_over_three_dimensions():
    """Two data-parallel dimensions over one of tensors: eight rows, of which each rank has one."""
    placements = (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0))
    found = []
    for rank in range(8):
        with simulated_world(8, rank=rank) as world:
            mesh = world.mesh((2, 2, 2), ("replicate", "shard", "tp"))
            tensor = DTensor.from_local(
                torch.zeros(1, 3), mesh, placements, run_check=False, shape=torch.Size([8, 3]), stride=(3, 1)
            )
            found.append(layout_of(tensor).box.dims)
    assert [dims[0] for dims in found] == [((row, row + 1),) for row in (0, 4, 2, 6, 1, 5, 3, 7)]
    assert {dims[1] for dims in found} == {((0, 3),)}


@pytest.mark.parametrize(
    ("placements", "pending", "dims"),
    [
        ((Partial(), Replicate()), (1, 3), None),
        ((Replicate(), Partial()), (2, 3), None),
        ((Partial(), Partial()), (0, 1, 2, 3), None),
        ((Partial(), Shard(0)), (1, 3), (((3, 5),), ((0, 2),))),
        ((Shard(0), Partial("avg")), (2, 3), (((3, 5),), ((0, 2),))),
    ],
    ids=str,
)
def test_sums_that_are_pending(placements, pending, dims):
    with mesh_of(3) as mesh:
        local = torch.ones(5, 2) if dims is None else torch.ones(2, 2)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([5, 2]), stride=(2, 1))
        layout = layout_of(tensor)
    assert (layout.pending, layout.box) == (pending, Box((5, 2), dims))


def test_what_is_full_has_no_spans():
    assert layout_of(torch.zeros(3, 2)).box == Box((3, 2)) and layout_of(torch.zeros(3)).mesh == ()
    with mesh_of(2) as mesh:
        assert layout_of(distribute_tensor(torch.zeros(()), mesh, src_data_rank=None)).box == Box(())
        # Of one row each rank of "dp" has all or nothing.
        shards = distribute_tensor(torch.zeros(1, 2), mesh, (Shard(0), Replicate()), src_data_rank=None)
        assert layout_of(shards).box == Box((1, 2), ((), ((0, 2),)))


def test_placements_without_a_rule_are_refused():
    with mesh_of(0) as mesh:
        tensor = DTensor.from_local(
            torch.zeros(2), mesh, (_StridedShard(0, split_factor=4), Shard(0)), run_check=False,
            shape=torch.Size([8]), stride=(1,),
        )  # fmt: skip
        with pytest.raises(AssertionError, match="the factor should be 2"):
            layout_of(tensor)


def test_spans_in_messages():
    assert span_text(((0, 4), (8, 12))) == "0-3, 8-11"
