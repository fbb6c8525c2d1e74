"""Sketches add over shards and contributions, tell distances, and with two numbers for the bits tell equal tensors."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch

from shardproof.harness.tensors import fingerprints
from shardproof.harness.tensors.fingerprints import Box, K, bits_of, bits_of_all, digest, digests, host_rows, on_host

SHAPES = [(), (1,), (7,), (0,), (5, 6), (3, 0), (4, 3, 5), (2, 3, 1, 4)]


def numbers(tensor, box=None):
    """The sketch and the squares."""
    return digest(tensor, box).numbers


def by_definition(tensor):
    """Each number is the tensor times one weight of each dimension, which are multiplied in full here."""
    weights = [fingerprints._full_weights(dim, size, tensor.device) for dim, size in enumerate(tensor.shape)]
    found = []
    for k in range(K):
        product = torch.ones((), dtype=torch.float64)
        for one in weights:
            product = product[..., None] * one[:, k]
        found.append((product * tensor.double()).sum())
    return torch.stack([*found, tensor.double().square().sum()])


def assert_near(one, other):
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.fixture(params=SHAPES, ids=str)
def tensor(request):
    return torch.randn(request.param, generator=torch.Generator().manual_seed(1))


def test_a_sketch_is_what_its_definition_says(tensor):
    assert_near(numbers(tensor), by_definition(tensor))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shards_of_each_dimension_add_up(tensor, size):
    for dim in range(tensor.ndim):
        total = torch.zeros(K + 1, dtype=torch.float64)
        for rows in torch.arange(tensor.shape[dim]).chunk(size):
            spans = ((int(rows[0]), int(rows[-1]) + 1),) if len(rows) else ()
            dims = tuple(spans if one == dim else ((0, length),) for one, length in enumerate(tensor.shape))
            total += numbers(tensor.index_select(dim, rows), Box(tuple(tensor.shape), dims))
        assert_near(total, numbers(tensor))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_flat_ranges_add_up(tensor, size):
    total = torch.zeros(K + 1, dtype=torch.float64)
    for places in torch.arange(tensor.numel()).tensor_split(size):
        start = int(places[0]) if len(places) else 0
        box = Box(tuple(tensor.shape), flat=(start, start + len(places)))
        total += numbers(tensor.flatten()[places], box)
    assert_near(total, numbers(tensor))


def test_every_flat_range_is_the_box_of_its_elements():
    full = torch.randn(3, 2, 4)
    for start, stop in itertools.combinations(range(25), 2):
        kept = torch.zeros(24)
        kept[start:stop] = full.flatten()[start:stop]
        found = numbers(full.flatten()[start:stop], Box((3, 2, 4), flat=(start, stop)))
        assert_near(found, numbers(kept.view(3, 2, 4)))


def test_spans_that_are_apart_add_up():
    """As of strided shards: one holds rows 0-1 and 4-5 and columns 1 and 3, the others the rest."""
    full = torch.randn(6, 4)
    rows = [((0, 2), (4, 6)), ((2, 4),)]
    columns = [((1, 2), (3, 4)), ((0, 1), (2, 3))]
    total = torch.zeros(K + 1, dtype=torch.float64)
    for dims in itertools.product(rows, columns):
        places = [torch.cat([torch.arange(*one) for one in spans]) for spans in dims]
        total += numbers(full[places[0]][:, places[1]], Box((6, 4), dims))
    assert_near(total, numbers(full))


def test_sums_over_ranks_add_up(tensor):
    other = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2))
    both = 0.25 * numbers(tensor)[:K] - 3 * numbers(other)[:K]
    assert_near(both, numbers(0.25 * tensor.double() - 3 * other.double())[:K])


@pytest.mark.parametrize("shape", [(3, 200_000), (2000, 150), (300_000,), (40, 70, 90)], ids=str)
def test_tensors_beyond_a_chunk_have_the_same_numbers(shape):
    assert math.prod(shape) > fingerprints._CHUNK
    tensor = torch.randn(shape)
    torch.testing.assert_close(numbers(tensor), by_definition(tensor), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunks_of_any_size_give_the_same_numbers(tensor, chunk, monkeypatch):
    before = numbers(tensor)
    monkeypatch.setattr(fingerprints, "_CHUNK", chunk)
    assert_near(numbers(tensor), before)


@pytest.mark.parametrize("shape", [(11,), (10, 3), (12, 2, 5)], ids=str)
def test_a_long_first_dimension_has_the_weights_of_two(shape, monkeypatch):
    """Those of its own, of a flat parameter say, would be larger than the tensor."""
    monkeypatch.setattr(fingerprints, "_LONG", 9)
    monkeypatch.setattr(fingerprints, "_SIDE", 4)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    folded = torch.zeros(3, 4, *shape[1:])
    folded.flatten(0, 1)[: shape[0]] = tensor
    assert_near(numbers(tensor), by_definition(folded))
    test_shards_of_each_dimension_add_up(tensor, 3)
    test_flat_ranges_add_up(tensor, 3)
    rest = tuple(((0, size),) for size in shape[1:])
    apart = [numbers(tensor[list(rows)], Box(shape, (spans, *rest))) for rows, spans in (
        ((0, 5, 6, 7, 8, 9), ((0, 1), (5, 10))), ((1, 2, 3, 4, *range(10, shape[0])), ((1, 5), (10, shape[0])))
    )]  # fmt: skip
    assert_near(sum(apart), numbers(tensor))


# Boxes


def test_the_elements_of_a_box():
    assert (Box(()).numel, Box((0, 3)).numel, Box((2, 3)).numel) == (1, 0, 6)
    box = Box((6, 4), (((0, 2), (4, 6)), ((1, 2),)))
    assert (box.numel, box.is_full, Box((6, 4), (((0, 6),), ((0, 4),))).is_full) == (4, False, True)
    assert (Box((2, 3), flat=(1, 6)).numel, Box((2, 3), flat=(0, 6)).is_full) == (5, True)


# Equality


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]


def identity(tensor):
    return on_host([digest(tensor)])[0].identity


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_tensors_have_equal_identities(dtype):
    one = torch.randn(50, 40).to(dtype)
    other = one.clone()
    assert identity(one) == identity(other)
    other[3, 5] = torch.nextafter(one[3, 5].float(), torch.tensor(9.0)) if dtype == torch.float32 else one[3, 5] + 1
    assert identity(one) != identity(other)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_bits_of_each_dtype(dtype):
    one = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype)
    other = torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype)
    assert bits_of(one).tolist() == bits_of(one.clone()).tolist() != bits_of(other).tolist()


def test_both_parts_of_complex_numbers_are_seen():
    assert bits_of(torch.tensor([1 + 2j])).tolist() != bits_of(torch.tensor([1 + 3j])).tolist()
    full = torch.complex(torch.randn(4, 3), torch.randn(4, 3)).conj()
    assert_near(numbers(full), by_definition(torch.stack([full.real, full.imag], dim=-1)))
    parts = numbers(full[:1], Box((4, 3), (((0, 1),), ((0, 3),))))
    assert_near(parts + numbers(full[1:].flatten(), Box((4, 3), flat=(3, 12))), numbers(full))
    assert digest(full).numel == 12


def test_strides_do_not_matter():
    """Rounding depends on the order in which elements are summed, and that on how they lie in memory."""
    for size in range(20):
        one = torch.randn(37 + size, 53)
        assert identity(one) == identity(one.t().contiguous().t())


def test_bits_see_what_their_xor_does_not():
    """An even number of equal elements leaves no trace in it: not that there are any, nor which."""
    ones, twos = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 2.0, 0.0])
    assert int(torch.hash_tensor(ones)) == int(torch.hash_tensor(twos)) == 0
    assert len({tuple(bits_of(one).tolist()) for one in (ones, twos, torch.zeros(3))}) == 3


def test_the_order_of_elements_is_seen():
    """By the sketch, and by the bits of what is not large: as many equal elements may grow as shrink by one step."""
    one, other = torch.arange(6.0).view(2, 3), torch.arange(6.0).flip(0).view(2, 3)
    assert bits_of(one).tolist()[:2] == bits_of(other).tolist()[:2]
    assert bits_of(one).tolist() != bits_of(other).tolist()
    assert identity(one) != identity(other)
    moved = torch.ones(8) + 2**-10 * torch.tensor([1.0, -1.0] * 4)
    assert bits_of(moved).tolist() != bits_of(torch.ones(8)).tolist()


def test_what_is_not_finite_equals_itself():
    one = torch.tensor([1.0, math.nan, math.inf])
    (mark,) = on_host([digest(one)])
    assert not mark.is_finite and mark.identity == identity(one.clone())
    assert on_host([digest(torch.ones(3))])[0].is_finite


def test_an_empty_tensor_is_nothing():
    (mark,) = on_host([digest(torch.zeros(0, 3))])
    assert (mark.sketch, mark.squares, mark.bits, mark.numel) == ((0.0,) * K, 0.0, (0, 0, 0), 0)
    assert bits_of(torch.zeros(0, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_many_at_once_are_what_each_is_alone():
    shapes = [(3, 4), (5,), (3, 4), (), (0, 2), (3, 4), (300, 400), (5,), (300, 400)]
    made = [torch.randn(shape) for shape in shapes]
    made += [made[0].to(torch.bfloat16), made[1].to(torch.complex64).conj(), made[2].t().contiguous().t()]
    boxes = [Box(tuple(tensor.shape)) for tensor in made]
    boxes[2] = Box((6, 4), (((1, 3), (5, 6)), ((0, 4),)))
    together = digests(made, boxes)
    for tensor, box, one, bits in zip(made, boxes, together, bits_of_all(made), strict=True):
        alone = digest(tensor, box)
        assert_near(one.numbers, alone.numbers)
        assert one.bits.tolist() == alone.bits.tolist() == bits.tolist() and one.numel == tensor.numel()
    assert together[2].bits.tolist() == together[-1].bits.tolist()


def test_host_rows_keep_the_order():
    assert host_rows([torch.tensor([n, -n]) for n in range(3)]) == [[0, 0], [1, -1], [2, -2]]
    assert host_rows([]) == []


# Distances


def differences(kind, count=500):
    """Differences between two matrices: of all elements, of rank one, of one element."""
    made = torch.Generator().manual_seed(0)
    for _ in range(count):
        if kind == "dense":
            yield torch.randn(300, 200, generator=made)
        elif kind == "rank one":
            yield torch.outer(torch.randn(300, generator=made), torch.randn(200, generator=made))
        else:
            found = torch.zeros(300, 200)
            found.view(-1)[torch.randint(60_000, (), generator=made)] = 1
            yield found


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("dense", 0.5, 1.5), ("rank one", 0.3, 1.8), ("one element", 0.3, 1.8)]
)
def test_distances_of_tensors_that_are_never_in_one_place(kind, low, high):
    first = torch.randn(300, 200)
    known, found = numbers(first)[:K], []
    for one in differences(kind):
        distance = (numbers(first.double() + one.double())[:K] - known).norm() / math.sqrt(K)
        found.append(float(distance / one.double().norm()))
    assert sum(low < one < high for one in found) >= 0.9 * len(found), sorted(found)[:: len(found) // 20]


# What stays


def test_weights_are_those_of_every_rank_and_nothing_is_kept_of_a_tensor():
    first = fingerprints._full_weights(1, 9, torch.device("cpu"))
    fingerprints._full_weights.cache_clear()
    torch.manual_seed(5)  # a rank's own seed
    assert torch.equal(fingerprints._full_weights(1, 9, torch.device("cpu")), first)
    numbers(torch.randn(4, 9))
    weights = fingerprints._full_weights.cache_info().currsize
    tensor = torch.randn(4, 9)
    made, ref = digest(tensor, Box((8, 9), (((4, 8),), ((0, 9),)))), weakref.ref(tensor)
    assert made.numbers.untyped_storage().nbytes() == 8 * (K + 1)
    del tensor
    assert ref() is None
    # One for each dimension and size: here one more, of 8 rows.
    assert fingerprints._full_weights.cache_info().currsize == weights + 1


def test_the_random_state_stays():
    before = torch.get_rng_state()
    fingerprints._full_weights.cache_clear()
    numbers(torch.ones(4, 9))
    assert torch.equal(torch.get_rng_state(), before)
