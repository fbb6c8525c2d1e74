"""A few numbers for a tensor, which add over its shards and over what ranks contribute to it.

The sketch of a tensor T of n dimensions is K numbers, ``sum_i a_k[i1] ... z_k[in] T[i1, ..., in]`` for k below K, with
standard normal weights that depend on the number of the dimension and on its full size alone. It is linear, and it is
cut like the tensor. So the sketch of a full tensor is the sum of those of its shards, under any layout and without a
gather, and the sketch of a sum over ranks is the sum of their sketches. And E[sketch_k(A - B)^2] = |A - B|^2, so that
distances are known between tensors that were never in one place (Alon, Matias, Szegedy, 1996; weights that are
products over dimensions: Pham, Pagh, 2013).

Sums are made in float64 whatever the dtype, because user code may lower the precision of float32 matrix products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardproof.harness.tensors.pieces import Spans

#: The numbers of a sketch. With eight, 90 % of estimated distances between matrices are 0.3 to 1.8 times the true ones,
#: and of vectors 0.6 to 1.4 times; each further dimension makes the range wider.
K = 8

#: Elements that are converted to float64 at a time, so that the copy stays in a cache.
_CHUNK = 1 << 17

#: Dtypes without sums, such as those of 8-bit floating point, are read as integers of their size.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITH_SUMS = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int8, *_INTEGERS.values()}
)


@dataclasses.dataclass(frozen=True)
class Box:
    """Which elements of a full tensor a rank holds; by default all of them.

    Attributes:
        shape: that of the full tensor.
        dims: for each dimension the spans of positions that are held; all combinations of them are.
        flat: in place of ``dims``, a range of positions in the flattened tensor, as flat parameters are cut.
    """

    shape: tuple[int, ...]
    dims: tuple[Spans, ...] | None = None
    flat: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        if self.flat is not None:
            return self.flat[1] - self.flat[0]
        if self.dims is None:
            return math.prod(self.shape)
        return math.prod(sum(stop - start for start, stop in spans) for spans in self.dims)

    @property
    def is_full(self) -> bool:
        """Whether it is all of the tensor."""
        return self.numel == math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Digest:
    """A digest on its tensor's device; :func:`on_host` copies many at once, so that no stream is waited for before.

    Attributes:
        numbers: float64 [K + 1]: the sketch, and the sum of the squares of the elements.
        bits: int64 [2]; see :func:`bits_of`. They do not see the order of the elements; the sketch does.
        numel: the number of elements.
    """

    numbers: torch.Tensor
    bits: torch.Tensor
    numel: int


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A digest on the host; see :class:`Digest`."""

    sketch: tuple[float, ...]
    squares: float
    bits: tuple[int, ...]
    numel: int

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for equal elements in the same order, if shape and kind of device are the same."""
        return self.bits, repr(self.sketch), self.numel  # as text, because a NaN is not equal to itself

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return math.isfinite(self.squares)


@torch.no_grad()
def digest(tensor: torch.Tensor, box: Box | None = None) -> Digest:
    """Compute the digest of what a rank holds of a full tensor; nothing is copied to the host.

    Args:
        tensor: plain, floating-point or complex, of any shape; the elements of ``box`` in their order.
        box: which elements of the full tensor they are; None if they are all.
    """
    # Contiguous, because the rounding of sums depends on strides.
    tensor, numel = tensor.detach().contiguous(), tensor.numel()
    box = Box(tuple(tensor.shape)) if box is None else box
    if tensor.is_complex():
        tensor, box = torch.view_as_real(tensor.resolve_conj()), _of_pairs(box)
    numbers = torch.zeros(K + 1, dtype=torch.float64, device=tensor.device)
    if tensor.numel():
        for part, dims in _parts(tensor, box):
            _add(numbers, part, [_weights(dim, box.shape[dim], spans, tensor.device) for dim, spans in enumerate(dims)])
    return Digest(numbers, bits_of(tensor), numel)


def _of_pairs(box: Box) -> Box:
    """Return the box of the real and imaginary parts, which are one more dimension."""
    dims = None if box.dims is None else (*box.dims, ((0, 2),))
    flat = None if box.flat is None else (2 * box.flat[0], 2 * box.flat[1])
    return Box((*box.shape, 2), dims, flat)


@torch.no_grad()
def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return two numbers for the bits of all elements of a tensor of any dtype, as int64 [2] on its device.

    The XOR of the elements does not see an even number of equal ones, and their sum does.
    """
    if not tensor.numel():
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    tensor = tensor.detach().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _WITH_SUMS:
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else None
    total = tensor.sum(dtype=wide).to(torch.float64)
    return torch.stack([torch.hash_tensor(tensor).view(torch.int64), total.view(torch.int64)])


def on_host(digests: Sequence[Digest]) -> list[Fingerprint]:
    """Copy digests to the host, by one copy for each device."""
    numbers, bits = host_rows([one.numbers for one in digests]), host_rows([one.bits for one in digests])
    return [
        Fingerprint(tuple(row[:K]), row[K], tuple(own), one.numel)
        for row, own, one in zip(numbers, bits, digests, strict=True)
    ]


def host_rows(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return tensors of one shape as Python numbers, by one copy for each device."""
    found: list[Any] = [None] * len(tensors)
    devices: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        devices.setdefault(tensor.device, []).append(position)
    for positions in devices.values():
        rows = torch.stack([tensors[position] for position in positions]).tolist()
        for position, row in zip(positions, rows, strict=True):
            found[position] = row
    return found


def _parts(tensor: torch.Tensor, box: Box) -> Iterator[tuple[torch.Tensor, tuple[Spans, ...]]]:
    """Yield a tensor in parts that are products of ranges, with the spans of their dimensions."""
    if box.flat is None:
        dims = box.dims or tuple(((0, size),) for size in box.shape)
        yield tensor.reshape([sum(stop - start for start, stop in spans) for spans in dims]), dims
        return
    start, done, flat = box.flat[0], 0, tensor.reshape(-1)
    for ranges in _boxes(*box.flat, box.shape):
        sizes = [stop - start for start, stop in ranges]
        numel = math.prod(sizes)
        yield flat[done : done + numel].view(sizes), tuple((one,) for one in ranges)
        done += numel
    assert start + done == box.flat[1]


def _boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the boxes, in order, that make up a range of a flattened tensor: at most two for each dimension and one."""
    if not shape:
        if start < stop:
            yield []
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        first = last = start // inner
        yield from (
            [(first, first + 1), *rest] for rest in _boxes(start - first * inner, stop - first * inner, shape[1:])
        )
        return
    if start < first * inner:
        row = first - 1
        yield from ([(row, first), *rest] for rest in _boxes(start - row * inner, inner, shape[1:]))
    if first < last:
        yield [(first, last), *((0, size) for size in shape[1:])]
    if last * inner < stop:
        yield from ([(last, last + 1), *rest] for rest in _boxes(0, stop - last * inner, shape[1:]))


def _add(numbers: torch.Tensor, tensor: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Add the sketch and the squares of a part; ``weights`` has a matrix [size, K] for each dimension."""
    if not tensor.ndim:
        tensor, weights = tensor.view(1), [torch.ones(1, K, dtype=torch.float64, device=tensor.device)]
    width = tensor.shape[-1]
    rows = tensor.reshape(-1, width)
    columns = min(width, _CHUNK)
    step = max(1, _CHUNK // columns)
    for row in range(0, rows.shape[0], step):
        count = min(step, rows.shape[0] - row)
        leading = _leading(row, count, tensor.shape[:-1], weights)
        for column in range(0, width, columns):
            part = rows[row : row + count, column : column + columns].double()
            sums = part @ weights[-1][column : column + columns]
            numbers[:K] += (sums * leading).sum(0)
            numbers[K] += part.square().sum()


def _leading(row: int, count: int, sizes: Sequence[int], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the products of the weights of all dimensions but the last, for some rows: [count, K]."""
    if len(sizes) == 1:
        return weights[0][row : row + count]
    product = torch.ones(count, K, dtype=torch.float64, device=weights[-1].device)
    places = torch.arange(row, row + count, device=product.device)
    for size, own in zip(reversed(sizes), reversed(weights[:-1]), strict=True):
        product = product * own[places % size]
        places = places // size
    return product


def _weights(dim: int, size: int, spans: Spans, device: torch.device) -> torch.Tensor:
    full = _full_weights(dim, size, device)
    parts = [full[start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else full[:0]


@functools.lru_cache(maxsize=256)
def _full_weights(dim: int, size: int, device: torch.device) -> torch.Tensor:
    """The weights [size, K] of a dimension; on every rank and in every process the same."""
    made = torch.Generator().manual_seed(1_000_003 * dim + size)
    return torch.randn(size, K, dtype=torch.float64, generator=made).to(device)
