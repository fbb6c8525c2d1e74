"""Where shards lie, checked against torch.chunk."""

import pytest
import torch

from fsdp_impl.common.collectives import reshard
from fsdp_impl.common.layout import chunk_rows, contiguous_stride, shard_rows
from fsdp_impl.per_parameter.layout import UnshardedBuffer, build_layout, shard_view, split_sizes

SIZES = [torch.Size(size) for size in ([5, 2], [3], [1, 4], [8, 1, 2], [0, 3])]


def cut(full: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    chunks = torch.chunk(full, world)
    return chunks[rank] if rank < len(chunks) else full[:0]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 9])
def test_rows_are_cut_as_torch_chunk_cuts_them(rows: int, world: int) -> None:
    full = torch.arange(rows)
    for rank in range(world):
        start, count = shard_rows(rows, world, rank)
        assert torch.equal(full.narrow(0, start, count), cut(full, world, rank))
        assert count <= chunk_rows(rows, world)


@pytest.mark.parametrize("size", [[], [3], [2, 3], [4, 0, 2], [0, 3], [2, 3, 4]])
def test_strides_are_those_of_a_new_tensor(size: list[int]) -> None:
    assert contiguous_stride(size) == torch.empty(size).stride()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_slots_fill_the_buffer_without_gap_or_overlap(world: int) -> None:
    layout = build_layout(SIZES, [torch.float32] * len(SIZES), world, 0)
    covered = [layout.slots[index].offset for index in layout.order]
    assert covered == [sum(split_sizes(layout)[:index]) for index in range(len(SIZES))]
    assert sum(split_sizes(layout)) == layout.numel


def test_several_dtypes_share_a_buffer_of_bytes_with_aligned_offsets() -> None:
    dtypes = [torch.uint8, torch.float64, torch.bfloat16, torch.float32, torch.int8]
    layout = build_layout(SIZES, dtypes, 2, 0)
    assert layout.dtype == torch.uint8
    assert all(slot.offset % slot.dtype.itemsize == 0 for slot in layout.slots)
    assert layout.numel == sum(
        chunk_rows(size[0], 2) * size[1:].numel() * dtype.itemsize for size, dtype in zip(SIZES, dtypes, strict=True)
    )


@pytest.mark.parametrize(
    "dtypes", [[torch.float32] * 5, [torch.uint8, torch.float64, torch.half, torch.float32, torch.int8]]
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_gather_of_all_buffers_gives_the_parameters_back(world: int, dtypes: list[torch.dtype]) -> None:
    full = [torch.arange(size.numel()).view(size).to(dtype) for size, dtype in zip(SIZES, dtypes, strict=True)]
    rows = []
    for rank in range(world):
        layout = build_layout(SIZES, dtypes, world, rank)
        buffer = torch.zeros(layout.numel, dtype=layout.dtype)
        for slot, tensor in zip(layout.slots, full, strict=True):
            view = shard_view(buffer, slot)
            view.copy_(cut(tensor, world, rank))
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        rows.append(buffer)
    unsharded = UnshardedBuffer(SIZES, layout, torch.device("cpu"))
    unsharded.allocate()
    versions = [tensor._version for tensor in unsharded.tensors]
    torch.split_with_sizes_copy(torch.stack(rows), split_sizes(layout), dim=1, out=unsharded.targets(layout))
    for tensor, expected in zip(unsharded.tensors, full, strict=True):
        assert torch.equal(tensor, expected)
    assert [tensor._version for tensor in unsharded.tensors] == versions, "autograd would take the copy for a change"


def test_reshard_frees_the_bytes_and_keeps_the_tensors() -> None:
    layout = build_layout(SIZES, [torch.float32] * len(SIZES), 2, 0)
    unsharded = UnshardedBuffer(SIZES, layout, torch.device("cpu"))
    first = unsharded.tensors[0]
    unsharded.allocate()
    assert first.untyped_storage().size() >= sum(size.numel() for size in SIZES) * 4
    reshard(unsharded, unit="layer")
    assert first.untyped_storage().size() == 0
    unsharded.allocate()
    first.fill_(1.0)
    assert unsharded.tensors[0] is first
