"""A few numbers for a tensor, which add over its shards and over what ranks contribute to it.

The sketch of a tensor T of n dimensions is K numbers, ``sum_i a_k[i1] ... z_k[in] T[i1, ..., in]`` for k below K, with
standard normal weights that depend on the number of the dimension and on its full size alone. It is linear, and it is
cut like the tensor. So the sketch of a full tensor is the sum of those of its shards, under any layout and without a
gather, and the sketch of a sum over ranks is the sum of their sketches. And E[sketch_k(A - B)^2] = |A - B|^2, so that
distances are known between tensors that were never in one place (Alon, Matias, Szegedy, 1996; weights that are
products over dimensions: Pham, Pagh, 2013).

Sums are made in float64 whatever the dtype, because user code may lower the precision of float32 matrix products.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardproof.harness.tensors.pieces import Spans

#: The numbers of a sketch. With eight, 90 % of estimated distances between matrices are 0.3 to 1.8 times the true ones,
#: and of vectors 0.6 to 1.4 times; each further dimension makes the range wider.
K = 8

#: Elements that are converted to float64 at a time: on the CPU so many that the copy stays in a cache, elsewhere so
#: many that kernels are few. Tensors of at most half as many are small, and those that are alike are read together.
_CHUNK = 1 << 17
_CHUNK_OF_ACCELERATORS = 1 << 21

FEW = 16
"""Fewer rows are summed along their columns first."""

#: A longer first dimension has the weights of two, of which the second has so many positions: its own weights would
#: take more memory than a sketch may.
_LONG = 1 << 19
_SIDE = 1 << 15

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
        return math.prod(self.held_shape)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the elements of ``dims``; a range of the flattened tensor has none."""
        if self.dims is None:
            return self.shape
        return tuple(sum(stop - start for start, stop in spans) for spans in self.dims)

    @property
    def is_full(self) -> bool:
        """Whether it is all of the tensor."""
        return self.numel == math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Digest:
    """A digest on its tensor's device; :func:`on_host` copies many at once, so that no stream is waited for before.

    Attributes:
        numbers: float64 [K + 1]: the sketch, and the sum of the squares of the elements.
        bits: int64 [3]; see :func:`bits_of`.
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
        # The sketch sees the order where the bits do not. As text, because a NaN is not equal to itself.
        return self.bits, "" if self.bits[2] else repr(self.sketch), self.numel

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return math.isfinite(self.squares)

    @property
    def vector(self) -> torch.Tensor:
        """The sketch as a vector, float64 [K]."""
        return torch.tensor(self.sketch, dtype=torch.float64)


def digest(tensor: torch.Tensor, box: Box | None = None) -> Digest:
    """Compute the digest of what a rank holds of a full tensor; nothing is copied to the host.

    Args:
        tensor: plain, floating-point or complex, of any shape; the elements of ``box`` in their order.
        box: which elements of the full tensor they are; None if they are all.
    """
    return digests([tensor], [Box(tuple(tensor.shape)) if box is None else box])[0]


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor], boxes: Sequence[Box]) -> list[Digest]:
    """Compute the digests of many tensors; see :func:`digest`."""
    found: list[Any] = [None] * len(tensors)
    for positions, stack in _stacks([strided(tensor.detach()) for tensor in tensors], boxes):
        numel, box = stack[0].numel(), boxes[positions[0]]
        bits = _bits(stack)
        if stack.is_complex():
            stack, box = torch.view_as_real(stack.resolve_conj()), of_pairs(box)
        parts = []
        if numel:
            shape = _folded(box.shape)
            for part, dims in _parts(stack, box, shape):
                weights = [_weights(dim, size, dims[dim], stack.device) for dim, size in enumerate(shape)]
                parts.append(_numbers(part, weights))
        numbers = _total(parts) if parts else torch.zeros(len(stack), K + 1, dtype=torch.float64, device=stack.device)
        for position, own, mine in zip(positions, numbers.unbind(), bits.unbind(), strict=True):
            found[position] = Digest(own, mine, numel)
    return found


def prepare(shape: Sequence[int], device: torch.device) -> None:
    """Make the weights for tensors of a shape, which is waited for on a device."""
    for dim, size in enumerate(_folded(tuple(shape))):
        _full_weights(dim, size, device)


def forget() -> None:
    """Let go of the weights that are kept from digest to digest."""
    _full_weights.cache_clear()


def of_pairs(box: Box) -> Box:
    """Return the box of the real and imaginary parts, which are one more dimension."""
    dims = None if box.dims is None else (*box.dims, ((0, 2),))
    flat = None if box.flat is None else (2 * box.flat[0], 2 * box.flat[1])
    return Box((*box.shape, 2), dims, flat)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return three numbers for the bits of all elements of a tensor of any dtype, as int64 [3] on its device.

    Of a small tensor the third number sees the bits of each element at its place, and the others are 0. That takes too
    long for a large one, which has the XOR of the elements and their sum: the first does not see an even number of
    equal elements, and neither sees the order.
    """
    return bits_of_all([tensor])[0]


@torch.no_grad()
def bits_of_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bits of many tensors; see :func:`bits_of`."""
    found: list[Any] = [None] * len(tensors)
    for positions, stack in _stacks([strided(tensor.detach()) for tensor in tensors], [None] * len(tensors)):
        for position, own in zip(positions, _bits(stack).unbind(), strict=True):
            found[position] = own
    return found


@torch.no_grad()
def position_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number for the bits of a tensor of any dtype and their places, int64 []."""
    return _placed(strided(tensor.detach()).contiguous()[None])[0]


@torch.no_grad()
def row_hashes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number for the bits of each row of a tensor of any dtype and at least one dimension, int64 [rows]."""
    return _placed(strided(tensor.detach()).contiguous())


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements can be read for one of any kind; most are returned themselves.

    Of a sparse one it is dense, of a nested one all values, of a quantized one its integers, of a subclass from outside
    of torch the bytes of what is in it, and of one without storage a zero.
    """
    if tensor.is_nested:
        parts = [tensor.values()] if tensor.layout is torch.jagged else tensor.unbind()
        return torch.cat([one.reshape(-1) for one in parts])
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.uint8)
    # A subclass of torch's own computes like a tensor.
    if hasattr(tensor, "__tensor_flatten__") and not type(tensor).__module__.startswith("torch."):
        inner = [strided(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
        return torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in inner])
    return tensor


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a contiguous tensor as integers of its elements' size; a complex element is two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _stacks(tensors: Sequence[torch.Tensor], keys: Sequence[Any]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield all tensors with their positions: small ones of one shape, dtype and key stacked, the others one by one.

    They are contiguous, because the rounding of sums depends on strides.
    """
    alike: dict[Any, list[int]] = {}
    for position, (tensor, key) in enumerate(zip(tensors, keys, strict=True)):
        alike.setdefault((tensor.shape, tensor.dtype, tensor.device, tensor.is_conj(), key), []).append(position)
    for positions in alike.values():
        first = tensors[positions[0]]
        count = max(1, _chunk_on(first.device) // max(1, first.numel()))
        for start in range(0, len(positions), count):
            some = positions[start : start + count]
            yield (
                some,
                tensors[some[0]].contiguous()[None] if len(some) == 1 else torch.stack([tensors[i] for i in some]),
            )


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is read together with others that are alike."""
    return tensor.numel() <= _chunk_on(tensor.device) // 2


def _chunk_on(device: torch.device) -> int:
    return _CHUNK if device.type == "cpu" else _CHUNK_OF_ACCELERATORS


def _bits(stack: torch.Tensor) -> torch.Tensor:
    """Return the bits of each tensor of a contiguous stack: [tensors, 3]."""
    none = torch.zeros(len(stack), dtype=torch.int64, device=stack.device)
    if is_small(stack[0]):
        return torch.stack([none, none, _placed(stack)], dim=1)
    if stack.is_complex():
        stack = torch.view_as_real(stack.resolve_conj())
    if stack.dtype not in _WITH_SUMS:
        stack = stack.view(_INTEGERS[stack.element_size()])
    if stack.dtype not in (torch.bfloat16, torch.float16):
        total = stack.sum().to(torch.float64)
    elif stack.device.type == "cpu":  # which converts all that it sums
        total = torch.stack([part.sum(dtype=torch.float32) for part in stack.view(-1).split(_CHUNK)]).double().sum()
    else:
        total = stack.sum(dtype=torch.float32).to(torch.float64)
    return torch.stack(
        [torch.hash_tensor(stack).view(torch.int64).view(1), total.view(torch.int64).view(1), none], dim=1
    )


def _placed(stack: torch.Tensor) -> torch.Tensor:
    """Return a number for the bits and places of the elements of each tensor of a contiguous stack: int64 [tensors]."""
    total = torch.zeros(len(stack), dtype=torch.int64, device=stack.device)
    words = words_of(stack).reshape(len(stack), -1)
    step = _chunk_on(stack.device)
    for start in range(0, words.shape[1], step):
        part = words[:, start : start + step].to(torch.int64, copy=True)
        places = torch.arange(start + 1, start + part.shape[1] + 1, device=stack.device)
        places = places * 0x9E3779B97F4A7C1 + 0x7F4A7C15
        total = total + part.add_(0x2545F491).mul_(places ^ (places >> 29)).sum(1)
    return total


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


def bits_on_host(bits: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Copy the bits of tensors to the host, by name; see :func:`bits_of_all`."""
    return {name: tuple(row) for name, row in zip(bits, host_rows([*bits.values()]), strict=True)}


def _folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape whose dimensions have weights: a long first dimension counts as two, with room at its end."""
    return (-(-shape[0] // _SIDE), _SIDE, *shape[1:]) if shape and shape[0] > _LONG else shape


def _parts(stack: torch.Tensor, box: Box, shape: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, tuple[Spans, ...]]]:
    """Yield a stack in parts that are products of ranges of a folded shape, with the spans of their dimensions."""
    if box.flat is not None:
        yield from _cut(stack.reshape(len(stack), -1), *box.flat, shape, ())
        return
    dims = box.dims or tuple(((0, size),) for size in box.shape)
    stack = stack.reshape([len(stack), *box.held_shape])
    if len(shape) == len(dims):
        yield stack, dims
        return
    done = 0
    for start, stop in dims[0]:
        yield from _cut(stack[:, done : done + stop - start], start, stop, shape[:2], dims[1:])
        done += stop - start


def _cut(
    stack: torch.Tensor, start: int, stop: int, shape: Sequence[int], rest: tuple[Spans, ...]
) -> Iterator[tuple[torch.Tensor, tuple[Spans, ...]]]:
    """Yield the boxes of a range of flattened dimensions, which are the first of a stack; ``rest`` has the others."""
    done = 0
    for ranges in _boxes(start, stop, shape):
        sizes = [last - first for first, last in ranges]
        numel = math.prod(sizes)
        part = stack[:, done : done + numel]
        yield part.reshape([len(stack), *sizes, *stack.shape[2:]]), (*((one,) for one in ranges), *rest)
        done += numel
    assert start + done == stop


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


def _numbers(stack: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sketch and the squares of each tensor; ``weights`` has a matrix [size, K] for each dimension."""
    split = _split(stack.shape[1:])
    left, right = _product(weights[:split], stack.device), _product(weights[split:], stack.device)
    count, height, width = len(stack), left.shape[0], right.shape[0]
    matrices, chunk = stack.reshape(count, height, width), _chunk_on(stack.device)
    columns = max(1, chunk // min(height, FEW))
    rows = max(1, chunk // min(width, columns))
    sketches, squares = [], []
    for column in range(0, width, columns):
        own = right[column : column + columns]
        sums: torch.Tensor | None = None
        for row in range(0, height, rows):
            part = matrices[:, row : row + rows, column : column + columns].double().contiguous()
            squares.append(_squares(part))
            if height < FEW:
                sketches.append(((part @ own) * left[row : row + rows]).sum(1))
                continue
            mine = left[row : row + rows].t().expand(count, -1, -1)
            sums = torch.bmm(mine, part) if sums is None else sums.baddbmm_(mine, part)
        if sums is not None:
            sketches.append((sums * own.t()).sum(2))
    return torch.cat([_total(sketches), _total(squares)[:, None]], dim=1)


def _squares(stack: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of each matrix, by what is fast on a device: [matrices]."""
    if stack.device.type == "cpu":
        rows = stack.view(len(stack), 1, -1)
        return torch.bmm(rows, rows.mT).flatten()
    norms: torch.Tensor = torch.linalg.vector_norm(stack, dim=(1, 2))
    return norms.square()


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


def _split(sizes: Sequence[int]) -> int:
    """Return how many dimensions are the rows of a matrix that has the fewest rows and columns together."""
    return min(range(len(sizes) + 1), key=lambda split: math.prod(sizes[:split]) + math.prod(sizes[split:]))


def _product(weights: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the products of the weights of some dimensions, one row for each combination of their positions."""
    if not weights:
        return torch.ones(1, K, dtype=torch.float64, device=device)
    found = weights[0]
    for one in weights[1:]:
        found = (found[:, None] * one).flatten(0, 1)
    return found


def row_weights(shape: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Return the weights of rows of a full tensor, of its first dimension: float64 [rows, K].

    Args:
        shape: of the full tensor; without dimensions it has one row.
        rows: int64, on the device where the weights are needed.
    """
    folded = _folded(tuple(shape))
    return _weights_at(folded[: len(folded) - len(shape[1:])], 0, rows)


def column_weights(shape: Sequence[int], columns: torch.Tensor) -> torch.Tensor:
    """Return the weights of elements of a row of a full tensor, by their flattened positions: float64 [columns, K].

    A weight of the sketch is the product of that of the row and that of the column; see :func:`row_weights`.
    """
    folded = _folded(tuple(shape))
    first = len(folded) - len(shape[1:])
    return _weights_at(folded[first:], first, columns)


def _weights_at(sizes: Sequence[int], first: int, places: torch.Tensor) -> torch.Tensor:
    """Return the products of the weights of dimensions from ``first`` on, at positions in their flattened order."""
    found = torch.ones(len(places), K, dtype=torch.float64, device=places.device)
    for dim, size in reversed([*enumerate(sizes, first)]):
        found = found * _full_weights(dim, size, places.device)[places % size]
        places = places // size
    return found


def _weights(dim: int, size: int, spans: Spans, device: torch.device) -> torch.Tensor:
    full = _full_weights(dim, size, device)
    parts = [full[start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else full[:0]


@functools.lru_cache(maxsize=256)
def _full_weights(dim: int, size: int, device: torch.device) -> torch.Tensor:
    """The weights [size, K] of a dimension; on every rank and in every process the same."""
    made = torch.Generator().manual_seed(1_000_003 * dim + size)
    return torch.randn(size, K, dtype=torch.float64, generator=made).to(device)
