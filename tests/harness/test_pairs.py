"""The choice of combinations: every pair that exists, for whoever can run what."""

import itertools
import random

import pytest

from shardproof.harness.plugin.pairs import WORLD, Combination, cover
from tests.harness.inner import python


def grid(axes, sizes=(2,), needs=lambda values: frozenset()):
    """The product of these values of parameters, by name, for each number of ranks."""
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [Combination(values, size, needs(values)) for values in rows for size in sizes]


def random_grid(seed):
    """Some combinations of up to four parameters and two worlds, some of which need something."""
    draw = random.Random(seed)
    axes = {name: [f"{name}{i}" for i in range(draw.randint(1, 4))] for name in "abcd"[: draw.randint(0, 4)]}
    features = {value: frozenset(draw.sample("xyz", draw.choice([0, 0, 1, 2]))) for v in axes.values() for value in v}
    every = grid(axes, (2, 4), lambda values: frozenset().union(*map(features.get, values.values())))
    return draw.sample(every, draw.randint(1, len(every)))


def parts(combinations):
    return {part for one in combinations for part in one.parts()}


def can_run(combinations, size, features):
    return [one for one in combinations if one.size <= size and one.needs <= set(features)]


@pytest.mark.parametrize("seed", range(60))
def test_whoever_can_run_a_pair_can_run_a_chosen_one_with_it(seed):
    every = random_grid(seed)
    chosen = [every[index] for index in cover(every)]
    assert len(chosen) <= len(every)
    assert {one.size for one in chosen} == {one.size for one in every}
    for size, count in itertools.product((2, 4), range(4)):
        for features in itertools.combinations("xyz", count):
            assert parts(can_run(chosen, size, features)) == parts(can_run(every, size, features))


def test_the_product_of_four_parameters_shrinks():
    every = grid({name: ["0", "1", "2"] for name in "abcd"})
    assert len(every) == 81
    assert len(cover(every)) <= 12


def test_one_parameter_keeps_all_its_values_and_every_world():
    every = grid({"a": ["0", "1", "2"]}, sizes=(4, 2))
    chosen = [every[index] for index in cover(every)]
    assert [(one.values["a"], one.size) for one in chosen] == [("0", 4), ("0", 2), ("1", 2), ("2", 2)]
    assert cover(grid({}, sizes=(1, 2, 8))) == [0, 1, 2] and cover([]) == []


def test_what_is_listed_is_kept_where_it_exists():
    every = grid({name: ["0", "1"] for name in "abc"}, sizes=(2, 4))
    listed = [frozenset({("a", "1"), ("b", "1"), ("c", "1"), (WORLD, "4")}), frozenset({("a", "7")})]
    chosen = [every[index] for index in cover(every, always=listed)]
    assert Combination({"a": "1", "b": "1", "c": "1"}, 4) in chosen


@pytest.mark.nightly
def test_the_choice_is_the_same_in_every_process():
    """Sets of texts are iterated in an order that depends on the seed of hashes."""
    script = "from tests.harness.test_pairs import *; print([cover(random_grid(seed)) for seed in range(20)])"
    printed = {python("-c", script, PYTHONHASHSEED=seed).stdout for seed in ("1", "2", "3")}
    assert len(printed) == 1 and printed.pop()
