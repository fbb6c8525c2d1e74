"""The count of the bugs that an effort finds tries what it keeps: of the function first, then of the chapter."""

from __future__ import annotations

import pytest

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness import found


class Own(ReferenceAdapter):
    """A bug whose item is kept."""


class Function(ReferenceAdapter):
    """One of which another item of the function is kept."""


class Chapter(ReferenceFlatAdapter):
    """One of which other functions of the chapter alone are kept."""


class Lives(ReferenceAdapter):
    """One that no item finds."""


ITEMS = [
    f"suites/test_{name}[{half}-w2-{value}]"
    for name in ("a.py::test_x", "a.py::test_xy", "b.py::test_x")
    for half in ("reference", "reference.flat")
    for value in ("one", "two")
]
KEPT = [
    "suites/test_a.py::test_x[reference-w2-one]",
    "suites/test_a.py::test_xy[reference-w2-two]",
    "suites/test_a.py::test_xy[reference.flat-w2-one]",
]
TABLE = {
    "own": (Own, "a.py and test_x[ and one"),
    "function": (Function, "a.py and test_x[ and two"),
    "chapter": (Chapter, "a.py and test_x[ and one"),
    "lives": (Lives, "b.py and two"),
}


@pytest.fixture
def bugs():
    return {bug.name: bug for bug in found.bugs_of(TABLE, ITEMS, KEPT)}


def test_items_that_are_tried(bugs):
    here = f"{__name__}:Function"
    assert bugs["function"].function == (f"suites/test_a.py::test_x[{here}-w2-one]",)
    assert bugs["function"].chapter == (
        f"suites/test_a.py::test_x[{here}-w2-one]",
        f"suites/test_a.py::test_xy[{here}-w2-two]",
    )


def test_a_bug_of_the_other_half_has_its_items(bugs):
    assert bugs["chapter"].item == "suites/test_a.py::test_x[reference.flat-w2-one]"
    assert bugs["chapter"].function == ()
    assert bugs["chapter"].chapter == (f"suites/test_a.py::test_xy[{__name__}:Chapter-w2-one]",)


def test_a_killer_that_names_two_items_is_refused():
    with pytest.raises(ValueError, match=r"the killer of both names .* instead of one item"):
        found.bugs_of({"both": (Own, "a.py and test_x[")}, ITEMS, KEPT)


def test_each_bug_is_counted_where_it_is_found(bugs, monkeypatch, capsys):
    runs = []

    def failing(ids, implementations):
        ids, implementations = tuple(ids), list(implementations)
        runs.append(ids)
        finds = {f"{__name__}:Function": "test_x[", f"{__name__}:Chapter": "test_xy["}
        return {one for one in implementations if any(finds.get(one, "nothing") in item for item in ids)}

    monkeypatch.setattr(found, "failing", failing)
    living = found.count(list(bugs.values()), KEPT, jobs=1)
    assert living == [bugs["lives"]]
    assert runs == [bugs["function"].function, bugs["chapter"].chapter]
    assert "by their own item 1, by another of its function 1, of its chapter 1" in capsys.readouterr().out
