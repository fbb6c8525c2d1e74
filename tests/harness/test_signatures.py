"""Each mistake of the table is named for a gradient that was made with it, from sketches and from full vectors."""

import math

import pytest
import torch

from shardproof.harness.judging.signatures import diagnose, fit, name_of_factor
from shardproof.harness.tensors.fingerprints import digest, on_host

#: Of float32 numbers.
TOLERANCE = 1e-5


class Made:
    """Gradients of a step on four ranks: ``parts[rank][microbatch]``, and the sums of the two steps before."""

    def __init__(self):
        torch.manual_seed(0)
        self.parts = [[torch.randn(6, 10) for _ in range(4)] for _ in range(4)]
        self.earlier = [torch.randn(6, 10), torch.randn(6, 10)]  # the last one first

    @property
    def whole(self):
        return sum(map(sum, self.parts))

    def rank(self, rank):
        return sum(self.parts[rank])

    def of(self, *weights):
        """The sum over ranks, with these weights of microbatches."""
        return sum(weight * parts[number] for parts in self.parts for number, weight in enumerate(weights) if weight)


@pytest.fixture
def made():
    return Made()


def full(tensor):
    return tensor.double().flatten()


def sketch(tensor):
    return torch.tensor(on_host([digest(tensor)])[0].sketch, dtype=torch.float64)


VECTORS = pytest.mark.parametrize("vector", [full, sketch], ids=["full", "sketch"])


def named(made, tensor, vector=full, *, tolerance=TOLERANCE):
    """What rank 1's gradient is."""
    own = {number: [vector(part) for part in parts] for number, parts in enumerate(made.parts)}
    groups, earlier = {"dp": range(4), "shard": (0, 1), "alone": (1,)}, [vector(one) for one in made.earlier]
    return diagnose(vector(tensor), own, rank=1, groups=groups, earlier=earlier, tolerance=tolerance)


#: The signature, the text, the ranks that are missing, and how rank 1's gradient is made.
MISTAKES = [
    ("S2", "is this rank's own gradient", (0, 2, 3), lambda g: g.rank(1)),
    ("S3", "is reduced over shard (ranks 0-1) only: ranks 2-3 are missing", (2, 3), lambda g: g.rank(0) + g.rank(1)),
    ("S3", "is reduced over ranks 1, 3 only: ranks 0, 2 are missing", (0, 2), lambda g: g.rank(1) + g.rank(3)),
    ("S4", "has the last of 4 microbatches only", (), lambda g: g.of(0, 0, 0, 1)),
    ("S4", "has the first of 4 microbatches only", (), lambda g: g.of(1, 0, 0, 0)),
    ("S4", "has microbatch 1 of 4 only", (), lambda g: g.of(0, 1, 0, 0)),
    ("S4", "has the last 3 of 4 microbatches only", (), lambda g: g.of(0, 1, 1, 1)),
    ("S4", "has the first 2 of 4 microbatches only", (), lambda g: g.of(1, 1, 0, 0)),
    ("S4", "lacks microbatch 1 of 4", (), lambda g: g.of(1, 0, 1, 1)),
    ("S4", "counts microbatch 0 of 4 twice", (), lambda g: g.of(2, 1, 1, 1)),
    ("S4", "is a running average: each of 4 microbatches counts half as much as the next one", (),
     lambda g: g.of(1, 2, 4, 8)),
    ("S4", "is doubled with each microbatch: each of 4 counts twice as much as the next one", (),
     lambda g: g.of(8, 4, 2, 1)),
    ("S4", "is this rank's own of the last of 4 microbatches only", (), lambda g: g.parts[1][3]),
    ("S4", "is this rank's own of the first of 4 microbatches only", (), lambda g: g.parts[1][0]),
    ("S2", "is the gradient of rank 0 alone", (1, 2, 3), lambda g: g.rank(0)),
    ("S3", "is reduced without rank 2", (2,), lambda g: g.whole - g.rank(2)),
    ("S3", "counts rank 1 twice", (), lambda g: g.whole + g.rank(1)),
    ("S4", "still contains the gradients of the step before: they were never zeroed", (),
     lambda g: g.whole + g.earlier[0]),
    ("S4", "still contains the gradients of the 2 steps before: they were never zeroed", (),
     lambda g: g.whole + g.earlier[0] + g.earlier[1]),
    ("S4", "still contains the gradients of the step before: they were never zeroed", (),
     lambda g: g.whole + 0.7 * g.earlier[0]),
    ("S12", "is the gradient of the step before", (), lambda g: g.earlier[0]),
    ("S12", "is the gradient of 2 steps before", (), lambda g: g.earlier[1]),
    ("S2", "has the last of 4 microbatches of all ranks, and this rank's own of the others", (),
     lambda g: g.of(0, 0, 0, 1) + sum(g.parts[1][:3])),
    ("S2", "has the first of 4 microbatches of all ranks, and this rank's own of the others", (),
     lambda g: g.of(1, 0, 0, 0) + sum(g.parts[1][1:])),
    ("S2", "has the first 3 of 4 microbatches of all ranks, and this rank's own of the others", (),
     lambda g: g.of(1, 1, 1, 0) + g.parts[1][3]),
    ("S5", "has microbatches of different weights: 0.25, 0.5, 0.75, 0.3", (), lambda g: g.of(1, 2, 3, 1.2)),
]  # fmt: skip


@VECTORS
@pytest.mark.parametrize(("signature", "text", "missing", "mistake"), MISTAKES, ids=[row[1][:50] for row in MISTAKES])
def test_each_mistake_is_named(made, vector, signature, text, missing, mistake):
    found = named(made, 0.25 * mistake(made), vector)
    assert (found.signature, found.text, found.missing) == (signature, text, missing)
    assert found.factor == pytest.approx(0.25, rel=1e-4) and found.residual < TOLERANCE


@VECTORS
@pytest.mark.parametrize("factor", [1.0, 0.25, 4.0])
def test_nothing_is_named_for_the_sum_of_all(made, vector, factor):
    found = named(made, factor * made.whole, vector)
    assert (found.signature, found.text, found.missing) == ("S1", "is all of it", ())
    assert found.factor == pytest.approx(factor, rel=1e-5)


@VECTORS
def test_no_mistake_is_named_for_what_is_none(made, vector):
    assert named(made, torch.randn(6, 10), vector) is None
    assert named(made, -made.rank(1), vector) is None, "a factor below zero"
    assert named(made, torch.full((6, 10), math.nan), vector) is None
    assert named(made, torch.zeros(6, 10), vector) is None
    assert diagnose(vector(made.whole), {0: []}, rank=0, groups={}, tolerance=TOLERANCE) is None


def test_of_mistakes_that_are_equally_near_the_first_of_the_table_is_named(made):
    """Of two ranks one's own gradient is the sum without the other; of two microbatches one lacks the other."""
    made.parts = [parts[:2] for parts in made.parts[:2]]
    own = {rank: [full(part) for part in parts] for rank, parts in enumerate(made.parts)}
    for seen, text in [
        (sum(own[0]), "is this rank's own gradient"),
        (own[0][1] + own[1][1], "has the last of 2 microbatches only"),
    ]:
        found = diagnose(seen, own, rank=0, groups={"alone": (0,)}, tolerance=TOLERANCE)
        assert found.text == text


def test_of_mistakes_within_a_wide_tolerance_the_nearest_is_named(made):
    """The last microbatch of all ranks comes first in the table, and is within what bfloat16 explains too."""
    made.parts = [[part if rank == 1 else part / 100 for part in parts] for rank, parts in enumerate(made.parts)]
    found = named(made, made.parts[1][3], tolerance=0.05)
    assert found.text == "is this rank's own of the last of 4 microbatches only"
    assert fit(full(made.parts[1][3]), full(made.of(0, 0, 0, 1)))[1] < 0.05
    assert named(made, made.of(0, 0, 0, 1), tolerance=0.05).text == "has the last of 4 microbatches only"


def test_what_is_hardly_nearer_than_the_sum_of_all_is_not_named(made):
    made.parts[3] = [part / 100 for part in made.parts[3]]
    seen = made.whole - 0.6 * made.rank(3)
    of_all, without = (fit(full(seen), full(one))[1] for one in (made.whole, made.whole - made.rank(3)))
    tolerance = (of_all + without) / 2
    assert without < tolerance < of_all < 8 * without
    assert named(made, seen, tolerance=tolerance) is None


def test_weights_that_are_hardly_nearer_than_the_sum_of_all_are_not_named(made):
    exactly = made.of(1.5, 1, 1, 0.5)
    seen = exactly + 0.1 * exactly.std() * torch.randn(6, 10)
    assert fit(full(seen), full(exactly))[1] < 0.12 < 0.2 < fit(full(seen), full(made.whole))[1]
    assert named(made, seen, tolerance=0.15) is None and named(made, exactly, tolerance=0.15).signature == "S5"


def test_groups_that_nothing_names_are_consecutive_ranks_or_ranks_at_one_distance(made):
    own = {rank: [full(torch.randn(6, 10))] for rank in range(8)}
    for members, text in [((4, 5), "4-5"), ((4, 5, 6, 7), "4-7"), ((1, 5), "1, 5"), ((1, 3, 5, 7), "1, 3, 5, 7")]:
        found = diagnose(sum(own[one][0] for one in members), own, rank=5, groups={}, tolerance=TOLERANCE)
        assert found.signature == "S3" and found.text.startswith(f"is reduced over ranks {text} only: ranks ")
    assert diagnose(own[4][0] + own[7][0], own, rank=5, groups={}, tolerance=TOLERANCE) is None


def test_of_ranks_with_other_numbers_of_microbatches_only_ranks_are_compared(made):
    made.parts[2] = []
    assert named(made, made.rank(0) + made.rank(1)).missing == (2, 3)
    assert named(made, sum(made.parts[rank][3] for rank in (0, 1, 3))) is None


SIZES = {"the size of dp": 4, "the size of tp": 2, "the tokens": 3, "the size of pp": 1, "the loss scale": 0}

FACTORS = {
    1: "1", 4: "the size of dp", 1 / 4: "1 / the size of dp", 8: "the size of dp x the size of tp",
    1 / 12: "1 / (the size of dp x the tokens)", 4 / 3: "the size of dp / the tokens",
    3 / 4: "the tokens / the size of dp", 3**0.5: "the square root of the tokens",
    2**-0.5: "1 / the square root of the size of tp", 4 * (1 + 0.9e-5): "the size of dp", 4 * (1 + 1.1e-5): "",
    -4: "", 0: "", 24: "",
}  # fmt: skip


@pytest.mark.parametrize(("factor", "name"), FACTORS.items())
def test_factors_are_named_by_the_sizes_of_a_run(factor, name):
    assert name_of_factor(factor, SIZES) == name
