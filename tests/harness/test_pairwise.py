"""The choices of an effort: every pair that exists, for whoever can run what, and one item of each function."""

import dataclasses
import itertools
import random

import pytest

from shardproof.harness.plugin.effort import WORLD, Candidate, Combination, choose_quick, cover
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
    script = "from tests.harness.test_pairwise import *; print([cover(random_grid(seed)) for seed in range(20)])"
    printed = {python("-c", script, PYTHONHASHSEED=seed).stdout for seed in ("1", "2", "3")}
    assert len(printed) == 1 and printed.pop()


# One item of each function


def candidate(function="f", *requirements, file="a.py", **more):
    return Candidate(file, function, requirements or ("A-1",), **more)


def candidates_of(function, requirement, **axes):
    """The product of values of parameters, in the order of their lists."""
    places = itertools.product(*(range(len(values)) for values in axes.values()))
    values = (dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values()))
    return [candidate(function, requirement, values=one, places=at) for one, at in zip(values, places, strict=True)]


def test_each_of_different_things_has_one_item():
    things = ["a", "b", "c"]
    every = candidates_of("f", "A-1", what=things, own=["x", "y"])
    candidates = [dataclasses.replace(one, apart=(one.values["what"],)) for one in every]
    chosen = [candidates[index].values for index in choose_quick(candidates)]
    assert [values["what"] for values in chosen] == things
    assert {values["own"] for values in chosen} == {"x", "y"}
    cannot = [dataclasses.replace(one, runs=one.values["what"] != "b") for one in candidates]
    assert [cannot[index].values["what"] for index in choose_quick(cannot)] == ["a", "c"]


def test_what_can_run_comes_before_what_cannot():
    candidates = [candidate("f", runs=False), candidate("g", runs=False), candidate("g")]
    assert choose_quick(candidates) == [2]


def test_a_requirement_of_which_nothing_can_run_has_one_item_all_the_same():
    candidates = [candidate("f", runs=False), candidate("f", runs=False), candidate("g", runs=False)]
    assert choose_quick(candidates) == [0]
    assert choose_quick([candidate("f", "A-1", "A-2", runs=False), candidate("g", "A-2")]) == [0, 1]


def test_the_last_values_come_first_and_the_others_in_turn():
    norms = ["2", "1", "inf"]
    candidates = [one for n in range(4) for one in candidates_of(f"f{n}", f"A-{n}", norm=norms, own=["plain", "odd"])]
    chosen = [(candidates[index].values["norm"], candidates[index].values["own"]) for index in choose_quick(candidates)]
    assert chosen == [("inf", "odd"), ("1", "plain"), ("2", "odd"), ("inf", "plain")]


def test_of_equal_ones_the_fewest_ranks_that_mean_something():
    assert choose_quick([candidate(size=2), candidate(size=4)]) == [0]
    assert choose_quick([candidate(size=2, is_meant=False), candidate(size=4)]) == [1]
    assert choose_quick([candidate(size=2, is_meant=False), candidate(size=4, runs=False)]) == [0]


def test_the_choice_in_a_file_does_not_depend_on_other_files():
    own = candidates_of("f", "A-1", a=["0", "1", "2"]) + candidates_of("f", "A-2", a=["0", "1", "2"])
    other = [candidate("g", "B-1", file="b.py", values={"a": "2"})] * 3
    alone = choose_quick(own)
    assert [index - 3 for index in choose_quick([*other, *own]) if index >= 3] == alone
