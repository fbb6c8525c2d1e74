"""The choice of a quick run: one item of each function."""

import dataclasses
import itertools

from shardproof.harness.plugin.quick import Candidate, choose


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
    chosen = [candidates[index].values for index in choose(candidates)]
    assert [values["what"] for values in chosen] == things
    assert {values["own"] for values in chosen} == {"x", "y"}
    cannot = [dataclasses.replace(one, runs=one.values["what"] != "b") for one in candidates]
    assert [cannot[index].values["what"] for index in choose(cannot)] == ["a", "c"]


def test_what_can_run_comes_before_what_cannot():
    candidates = [candidate("f", runs=False), candidate("g", runs=False), candidate("g")]
    assert choose(candidates) == [2]


def test_a_requirement_of_which_nothing_can_run_has_one_item_all_the_same():
    candidates = [candidate("f", runs=False), candidate("f", runs=False), candidate("g", runs=False)]
    assert choose(candidates) == [0]
    assert choose([candidate("f", "A-1", "A-2", runs=False), candidate("g", "A-2")]) == [0, 1]


def test_the_last_values_come_first_and_the_others_in_turn():
    norms = ["2", "1", "inf"]
    candidates = [one for n in range(4) for one in candidates_of(f"f{n}", f"A-{n}", norm=norms, own=["plain", "odd"])]
    chosen = [(candidates[index].values["norm"], candidates[index].values["own"]) for index in choose(candidates)]
    assert chosen == [("inf", "odd"), ("1", "plain"), ("2", "odd"), ("inf", "plain")]


def test_of_equal_ones_the_fewest_ranks_that_mean_something():
    assert choose([candidate(size=2), candidate(size=4)]) == [0]
    assert choose([candidate(size=2, is_meant=False), candidate(size=4)]) == [1]
    assert choose([candidate(size=2, is_meant=False), candidate(size=4, runs=False)]) == [0]


def test_the_choice_in_a_file_does_not_depend_on_other_files():
    own = candidates_of("f", "A-1", a=["0", "1", "2"]) + candidates_of("f", "A-2", a=["0", "1", "2"])
    other = [candidate("g", "B-1", file="b.py", values={"a": "2"})] * 3
    alone = choose(own)
    assert [index - 3 for index in choose([*other, *own]) if index >= 3] == alone
