"""Which rows of a tensor a rank holds, and how a contiguous tensor lies in memory: pure arithmetic."""

from collections.abc import Sequence


def chunk_rows(rows: int, world: int) -> int:
    """Rows of a full chunk: ``ceil(rows / world)``."""
    return -(-rows // world)


def shard_rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of ``rank``'s chunk; an empty chunk starts at ``rows``."""
    chunk = chunk_rows(rows, world)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``size``; dimensions of length 0 count as 1, as in torch."""
    stride = [1] * len(size)
    for dim in range(len(size) - 1, 0, -1):
        stride[dim - 1] = stride[dim] * max(size[dim], 1)
    return tuple(stride)
