"""What holds of every layout: parameters of any sizes, dimensions and dtypes, over any world.

How gradients are packed, and where shards of tensor parallelism are placed, planted bugs of the suites show.
"""

from typing import Any, NamedTuple

import torch

from fsdp_impl.common.layout import chunk_rows, shard_rows
from fsdp_impl.per_parameter.layout import (
    BufferLayout,
    UnshardedBuffer,
    build_layout,
    copy_out,
    shard_size,
    shard_view,
)
from tests.fsdp_impl.properties import given, st

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64]


class Params(NamedTuple):
    """Parameters of one group, whole: sizes, the dimensions that they are cut along, and dtypes."""

    world: int
    sizes: list[torch.Size]
    dims: list[int]
    dtypes: list[torch.dtype]

    def layout(self, rank: int, world: int | None = None) -> BufferLayout:
        return build_layout(self.sizes, self.dtypes, world or self.world, rank, self.dims)

    def values(self) -> list[torch.Tensor]:
        """No element is zero, which padding is."""
        return [
            (torch.arange(size.numel()) % 200 + 1).view(size).to(dtype)
            for size, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]

    def part(self, tensor: torch.Tensor, index: int, rank: int, world: int | None = None) -> torch.Tensor:
        dim = self.dims[index]
        return tensor.narrow(dim, *shard_rows(tensor.size(dim), world or self.world, rank))


@st.composite
def groups(draw: Any) -> Params:
    world = draw(st.integers(1, 6))
    number = draw(st.integers(1, 5))
    sizes, dims = [], []
    for _ in range(number):
        size = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(size) - 1))
        if dim > 0:
            size[dim] = world * draw(st.integers(0, 3))  # what fully_shard asks for
        sizes.append(torch.Size(size))
        dims.append(dim)
    return Params(world, sizes, dims, [draw(st.sampled_from(DTYPES)) for _ in sizes])


@given(rows=st.integers(0, 60), world=st.integers(1, 20))
def test_chunks_are_those_of_torch_and_cover_the_rows(rows: int, world: int) -> None:
    full = torch.arange(rows)
    cut = [full.narrow(0, *shard_rows(rows, world, rank)) for rank in range(world)]
    assert torch.equal(torch.cat(cut), full)
    assert all(piece.numel() <= chunk_rows(rows, world) for piece in cut)
    expected = torch.chunk(full, world) if rows else ()
    assert [piece.tolist() for piece in cut if piece.numel()] == [piece.tolist() for piece in expected]


@given(params=groups())
def test_slots_are_aligned_and_fill_the_buffer_alike_on_every_rank(params: Params) -> None:
    layouts = [params.layout(rank) for rank in range(params.world)]
    first = layouts[0]
    taken = [0] * first.numel
    for index, slot in enumerate(first.slots):
        assert slot.offset * first.dtype.itemsize % slot.dtype.itemsize == 0
        for place in range(slot.offset, slot.offset + slot.extent):
            taken[place] += 1
        for rank, layout in enumerate(layouts):
            other = layout.slots[index]
            assert (other.offset, other.extent, other.blocks) == (slot.offset, slot.extent, slot.blocks)
            assert other.size == shard_size(params.sizes[index], params.world, rank, params.dims[index])
            nbytes = other.size.numel() * other.dtype.itemsize
            assert nbytes <= slot.extent * first.dtype.itemsize
            # Rows are padded to those of the first rank; cut along another dimension there is no padding.
            assert (params.dims[index] == 0 and rank > 0) or nbytes == slot.extent * first.dtype.itemsize
    assert taken == [1] * first.numel
    assert {layout.order for layout in layouts} == {first.order}
    assert sum(first.extents) == first.numel


@given(params=groups(), data=st.data())
def test_a_gather_gives_the_parameters_back(params: Params, data: Any) -> None:
    """Also one over fewer ranks, into memory that was made for all."""
    apart = data.draw(st.sets(st.integers(0, len(params.sizes) - 1)), label="apart")
    smaller = data.draw(st.sampled_from([n for n in range(1, params.world + 1) if params.world % n == 0]))
    unsharded = UnshardedBuffer(params.sizes, params.layout(0), torch.device("cpu"), apart=apart)
    values = params.values()
    for world in (params.world, smaller):
        unsharded.free()
        unsharded.allocate()
        versions = [tensor._version for tensor in unsharded.tensors]
        rows = []
        for rank in range(world):
            layout = params.layout(rank, world)
            buffer = torch.zeros(layout.numel, dtype=layout.dtype)
            for index, (slot, value) in enumerate(zip(layout.slots, values, strict=True)):
                view = shard_view(buffer, slot)
                view.copy_(params.part(value, index, rank, world))
                assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            rows.append(buffer)
        copy_out(torch.stack(rows), layout, unsharded.targets(layout))
        for tensor, value in zip(unsharded.tensors, values, strict=True):
            assert torch.equal(tensor, value)
        assert [tensor._version for tensor in unsharded.tensors] == versions
    for index, tensor in enumerate(unsharded.tensors):
        others = [other for place, other in enumerate(unsharded.tensors) if place != index]
        if index in apart:
            assert tensor.storage_offset() == 0
            assert tensor.untyped_storage()._cdata not in {other.untyped_storage()._cdata for other in others}
