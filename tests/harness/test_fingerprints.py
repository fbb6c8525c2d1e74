"""Sketches add over shards and contributions, tell distances, and with two numbers for the bits tell equal tensors."""

import itertools
import math
import weakref

import pytest
import torch

from shardproof.harness.tensors import fingerprints
from shardproof.harness.tensors.fingerprints import Box, K, bits_of, bits_of_all, digest, digests, on_host

CPU = torch.device("cpu")
SHAPES = [(), (1,), (7,), (0,), (5, 6), (3, 0), (4, 3, 5), (2, 3, 1, 4)]


def numbers(tensor, box=None):
    """The sketch and the squares."""
    return digest(tensor, box).numbers


def identity(tensor):
    return on_host([digest(tensor)])[0].identity


def by_definition(tensor):
    """Each number is the tensor times one weight of each dimension, which are multiplied in full here."""
    found = []
    for k in range(K):
        product = torch.ones((), dtype=torch.float64)
        for dim, size in enumerate(tensor.shape):
            product = product[..., None] * fingerprints._full_weights(dim, size, CPU)[:, k]
        found.append((product * tensor.double()).sum())
    return torch.stack([*found, tensor.double().square().sum()])


def assert_near(one, other):
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-9)


@pytest.fixture(params=SHAPES, ids=str)
def tensor(request):
    return torch.randn(request.param, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[False, True], ids=["", "folded"])
def folded(request, monkeypatch):
    """A first dimension that is long has the weights of two."""
    if request.param:
        monkeypatch.setattr(fingerprints, "_LONG", 3)
        monkeypatch.setattr(fingerprints, "_SIDE", 2)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shards_of_each_dimension_add_up(tensor, size, folded):
    for dim in range(tensor.ndim):
        total = torch.zeros(K + 1, dtype=torch.float64)
        for rows in torch.arange(tensor.shape[dim]).chunk(size):
            spans = ((int(rows[0]), int(rows[-1]) + 1),) if len(rows) else ()
            dims = tuple(spans if one == dim else ((0, length),) for one, length in enumerate(tensor.shape))
            total += numbers(tensor.index_select(dim, rows), Box(tuple(tensor.shape), dims))
        assert_near(total, numbers(tensor))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_flat_ranges_add_up(tensor, size, folded):
    total = torch.zeros(K + 1, dtype=torch.float64)
    for places in torch.arange(tensor.numel()).tensor_split(size):
        start = int(places[0]) if len(places) else 0
        total += numbers(tensor.flatten()[places], Box(tuple(tensor.shape), flat=(start, start + len(places))))
    assert_near(total, numbers(tensor))


def test_spans_that_are_apart_add_up(folded):
    """As of strided shards: one holds rows 0-1 and 4-5 and columns 1 and 3, the others the rest."""
    full, total = torch.randn(6, 4), torch.zeros(K + 1, dtype=torch.float64)
    for dims in itertools.product([((0, 2), (4, 6)), ((2, 4),)], [((1, 2), (3, 4)), ((0, 1), (2, 3))]):
        places = [torch.cat([torch.arange(*one) for one in spans]) for spans in dims]
        total += numbers(full[places[0]][:, places[1]], Box((6, 4), dims))
    assert_near(total, numbers(full))


@pytest.mark.parametrize("shape", [*SHAPES, (3, 200_000), (2000, 150), (300_000,), (40, 70, 90)], ids=str)
def test_a_sketch_is_what_its_definition_says(shape):
    """Also of what is larger than a chunk."""
    tensor = torch.randn(shape)
    torch.testing.assert_close(numbers(tensor), by_definition(tensor), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("shape", [(8,), (7, 3)], ids=str)
def test_a_long_first_dimension_has_the_weights_of_two(shape, monkeypatch):
    monkeypatch.setattr(fingerprints, "_LONG", 3)
    monkeypatch.setattr(fingerprints, "_SIDE", 2)
    tensor, two = torch.randn(shape), torch.zeros(4, 2, *shape[1:])
    two.flatten(0, 1)[: shape[0]] = tensor
    assert_near(numbers(tensor), by_definition(two))


@pytest.mark.parametrize(("chunk", "few"), [(1, 16), (3, 2), (8, 16)])
def test_chunks_of_any_size_give_the_same_numbers(tensor, chunk, few, monkeypatch):
    before = numbers(tensor)
    monkeypatch.setattr(fingerprints, "_CHUNK", chunk)
    monkeypatch.setattr(fingerprints, "FEW", few)
    assert_near(numbers(tensor), before)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_tensors_have_equal_identities(dtype):
    """However they lie in memory: rounding depends on the order in which elements are summed."""
    for size in range(20):
        one = torch.randn(37 + size, 53).to(dtype)
        assert identity(one) == identity(one.clone()) == identity(one.t().contiguous().t())
    other = one.clone()
    other[3, 5] *= 1 + torch.finfo(dtype).eps
    assert identity(one) != identity(other)
    other[3, 5] = math.nan
    assert identity(other) == identity(other.clone())
    assert [mark.is_finite for mark in on_host([digest(one), digest(other)])] == [True, False]


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_bits_of_each_dtype(dtype):
    one, other = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype), torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype)
    assert bits_of(one).tolist() == bits_of(one.clone()).tolist() != bits_of(other).tolist()
    assert bits_of(one[:0]).tolist() == [0, 0, 0]


def test_both_parts_of_complex_numbers_are_seen():
    assert bits_of(torch.tensor([1 + 2j])).tolist() != bits_of(torch.tensor([1 + 3j])).tolist()
    full = torch.complex(torch.randn(4, 3), torch.randn(4, 3)).conj()
    assert_near(numbers(full), by_definition(torch.stack([full.real, full.imag], dim=-1)))
    parts = numbers(full[:1], Box((4, 3), (((0, 1),), ((0, 3),))))
    assert_near(parts + numbers(full[1:].flatten(), Box((4, 3), flat=(3, 12))), numbers(full))


def test_bits_see_what_their_xor_does_not(monkeypatch):
    """Of an even number of equal elements nothing is left in the XOR: not that there are any, nor which."""
    ones, twos = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 2.0, 0.0])
    assert int(torch.hash_tensor(ones)) == int(torch.hash_tensor(twos)) == 0
    # In Adam's first step as many equal elements may grow as shrink, by one step.
    one = torch.full((4,), 1.5)
    other = one + 2**-23 * torch.tensor([1, -1, 1, -1])
    assert not torch.equal(bits_of(one), bits_of(other)) and not torch.equal(bits_of(ones), bits_of(ones.flip(0)))
    monkeypatch.setattr(fingerprints, "is_small", lambda tensor: False)
    assert len({tuple(bits_of(one).tolist()) for one in (ones, twos, torch.zeros(3))}) == 3
    assert torch.equal(bits_of(ones), bits_of(ones.flip(0))) and identity(ones) != identity(ones.flip(0))


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


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("dense", 0.5, 1.5),
        *(pytest.param(kind, 0.3, 1.8, marks=pytest.mark.nightly) for kind in ("rank one", "element")),
    ],
)
def test_distances_of_tensors_that_are_never_in_one_place(kind, low, high):
    made, first, found = torch.Generator().manual_seed(0), torch.randn(300, 200).double(), []
    for _ in range(300):
        one = torch.randn(300, 200, generator=made).double()
        if kind == "rank one":
            one = torch.outer(one[0].repeat(2)[:300], one[1])
        elif kind == "element":
            one = torch.zeros_like(one).view(-1).index_fill(0, one.argmax(), 1).view(300, 200)
        distance = (numbers(first + one)[:K] - numbers(first)[:K]).norm() / math.sqrt(K)
        found.append(float(distance / one.norm()))
    assert sum(low < one < high for one in found) >= 0.9 * len(found), sorted(found)[::15]


def test_nothing_is_kept_of_a_tensor_and_weights_are_those_of_every_rank():
    first, state = fingerprints._full_weights(1, 9, CPU), torch.get_rng_state()
    fingerprints._full_weights.cache_clear()
    numbers(torch.randn(4, 9, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), state), "a rank's own random numbers"
    assert torch.equal(fingerprints._full_weights(1, 9, CPU), first)
    tensor = torch.randn(4, 9)
    made, ref = digest(tensor, Box((8, 9), (((4, 8),), ((0, 9),)))), weakref.ref(tensor)
    assert made.numbers.untyped_storage().nbytes() == 8 * (K + 1)
    del tensor
    assert ref() is None
    assert fingerprints._full_weights.cache_info().currsize == 3, "one for each dimension and size: 4, 9 and 8"
