"""docs/features.md is that that the contract and the suites give, which agree."""

import importlib
import re
from pathlib import Path

import pytest

from planted.table import contract_marks
from shardproof import contract
from tests.harness.inner import python

ROOT = Path(__file__).parents[1]
CONTRACT = """# The contract

## ONE: the first

| id | for | requirement |
|---|---|---|
| ONE-1 | any | It trains. |
| ONE-2 |  | It clips. |
"""


@pytest.fixture
def make_features(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("make_features")


@pytest.mark.parametrize("script", ["make_features", "make_crossed"])
def test_the_tables_are_up_to_date(script):
    python(f"docs/{script}.py", "--check", code=0)


def test_numbers_of_requirements_are_given_once():
    ids = re.findall(r"^\| ([A-Z]+-\d+) \|", (ROOT / "docs/contract.md").read_text(), flags=re.MULTILINE)
    assert len(ids) == len(set(ids)) > 0


def test_every_case_names_a_requirement_of_its_chapter():
    for case, ids in contract_marks().items():
        # A long chapter has several files, whose names begin with it.
        chapter = re.split("[_.]", case.partition("test_")[2])[0].upper()
        assert ids, f"{case} names no requirement"
        assert all(name.startswith(f"{chapter}-") for name in ids), f"{case} names {ids}"


def item(ids, *needs, ranks=2, hardware=()):
    return contract.Item(tuple(ids.split()), ranks, frozenset(needs), frozenset(hardware))


def test_rows(make_features):
    chapters = make_features.chapters(CONTRACT)
    items = {
        "suites/test_one.py::test_trains[w2]": item("ONE-1"),
        "suites/test_one.py::test_trains[w4]": item("ONE-1", "grouped-unit"),
        "suites/test_one.py::test_clips[w2]": item("ONE-2", "clipping", "grouped-unit", hardware=["streams"]),
    }
    assert make_features.problems(chapters, items) == []
    page = make_features.page(chapters, items)
    assert "| ONE-1 | test_trains (2) | any; some: grouped-unit | all |" in page
    assert "| ONE-2 | test_clips (1) | grouped-unit, clipping, *streams* | reference, torch.fully_shard |" in page
    assert "| ONE | the first | 2 | 2 |" in page


def test_both_ways(make_features):
    lacking = [f"docs/contract.md: {name} has no case" for name in ("ONE-1", "ONE-2")]
    found = make_features.problems(make_features.chapters(CONTRACT), {"test_one.py::test_other[w2]": item("TWO-1")})
    assert found == [*lacking, "suites: a case names TWO-1, which docs/contract.md does not have"]


def test_a_version_with_a_commit_is_closed(make_features, tmp_path, monkeypatch):
    monkeypatch.setattr(make_features, "ROOT", tmp_path)
    files = make_features.listed("| 2030.1 | | |\n| 2029.1 | `c0ffee1` | |\n", {"a[w2]": item("ONE-1", "clipping")})
    [(path, text)] = files.items()
    assert (path, text) == (tmp_path / "shardproof/contract-2030.1.tsv", "a\tONE-1\tclipping\t-\n\tw2\n")
    path.parent.mkdir()
    path.write_text(text)
    closed = "| 2030.1 | `c0ffee1` | |\n"
    assert make_features.listed(closed, {"a[w2]": item("ONE-1", "clipping")}) == files
    with pytest.raises(ValueError, match=r"2030\.1 is closed, c0ffee1 has its items"):
        make_features.listed(closed, {"a[w4]": item("ONE-1", "clipping")})


def test_a_profile_names_only_what_its_items_have(make_features):
    text = "| `core` | us | cpu-4 |  | clipping, hybrid | ONE-1, ONE-2 |"
    items = {"a": item("ONE-1", "clipping"), "too many ranks": item("ONE-2", "hybrid", ranks=8)}
    names = [line.rpartition(" ")[2] for line in make_features.unused(text, items)]
    assert names == ["hybrid", "ONE-2"]
