"""The choice of one item for each requirement."""

from __future__ import annotations

import itertools

from shardproof.harness.plugin.quick import Candidate, choose


def candidate(function="f", *requirements, file="a.py", **more):
    return Candidate(file, function, requirements or ("A-1",), **more)


def grid(function, requirement, **axes):
    """The product of values of parameters, in the order of their lists."""
    rows = itertools.product(*(enumerate(values) for values in axes.values()))
    return [
        candidate(
            function,
            requirement,
            values=dict(zip(axes, (value for _, value in row), strict=True)),
            places=tuple(place for place, _ in row),
        )
        for row in rows
    ]


def test_each_requirement_chooses_one():
    candidates = [candidate("f", "A-1")] * 5 + [candidate("g", "A-2")] * 5
    assert [candidates[index].function for index in choose(candidates)] == ["f", "g"]


def test_what_can_run_comes_before_what_cannot():
    candidates = [candidate("f", runs=False), candidate("g", runs=False), candidate("g")]
    assert choose(candidates) == [2]
    assert choose([candidates[0], candidates[1]]) == [0]


def test_a_function_that_another_requirement_has_taken_comes_last():
    both = candidate("f", "A-1", "A-2")
    assert choose([both, candidate("g", "A-2")]) == [0, 1]
    assert choose([both]) == [0]
    assert choose([both, candidate("g", "A-2", runs=False)]) == [0]


def test_the_function_that_needs_most_comes_first():
    candidates = [candidate("f"), candidate("g", needs=2), candidate("h", needs=2), candidate("i", needs=3, runs=False)]
    assert choose(candidates) == [1]


def test_requirements_without_a_choice_choose_first():
    assert choose([candidate("f", "A-1", "A-2", needs=1), candidate("g", "A-1")]) == [0, 1]


def test_the_last_values_come_first_and_the_others_in_turn():
    norms = ["2", "1", "inf"]
    candidates = [one for n in range(4) for one in grid(f"f{n}", f"A-{n}", norm=norms, own=["plain", "odd"])]
    chosen = [(candidates[index].values["norm"], candidates[index].values["own"]) for index in choose(candidates)]
    assert chosen == [("inf", "odd"), ("1", "plain"), ("2", "odd"), ("inf", "plain")]


def test_of_equal_ones_the_fewest_ranks_that_mean_something():
    assert choose([candidate(size=2), candidate(size=4)]) == [0]
    assert choose([candidate(size=2, is_meant=False), candidate(size=4)]) == [1]
    assert choose([candidate(size=2, is_meant=False), candidate(size=4, runs=False)]) == [0]


def test_the_choice_in_a_file_does_not_depend_on_other_files():
    own = grid("f", "A-1", a=["0", "1", "2"]) + grid("f", "A-2", a=["0", "1", "2"])
    other = [candidate("g", "B-1", file="b.py", values={"a": "2"})] * 3
    alone = choose(own)
    assert [index - 3 for index in choose([*other, *own]) if index >= 3] == alone
