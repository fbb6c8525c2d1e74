"""The contract and the suites agree, and what is written of both is made when it is asked for, and not committed."""

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from planted.table import contract_marks
from shardproof import contract
from tests.harness.inner import python

ROOT = Path(__file__).parents[1]
PLANTED = "planted/inputs.toml"
CONTRACT = """# The contract

## ONE: the first

| id | for | requirement |
|---|---|---|
| ONE-1 | any | It trains. |
| ONE-2 |  | It clips. |
"""


CASE = """

@contract("INPUTS-99")
@world(2)
def test_a_batch_of_today(rank):
    \"\"\"It trains.\"\"\"
"""
ROW = """
[[bug]]
id = "a-batch-of-today-is-of-yesterday"
requirement = "INPUTS-99"
in = "fsdp_impl.common.hooks:call_after_backward"
old = "if not tensors:"
new = "if True:"
found_by = "test_a_batch_of_today[reference-w2]"
says = "a phrase that is long enough"
"""


@pytest.fixture
def make(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("make")


def test_the_drawn_rows_are_up_to_date():
    python("docs/make.py", "--check", "drawn", code=0)


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_case_is_three_files(tmp_path_factory):
    """Its chapter, the contract's sentence and its planted row: nothing else that is committed is written anew."""
    # Not tmp_path, in which every run file is validated: a clone has the published ones.
    clone = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines() or pytest.skip("not a clone"):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    contract, chapter, planted = (clone / name for name in ("docs/contract.md", "suites/test_inputs.py", PLANTED))
    first = next(line for line in contract.read_text().splitlines() if line.startswith("| INPUTS-1 |"))
    contract.write_text(contract.read_text().replace(first, f"{first}\n| INPUTS-99 | any | A batch trains. |"))
    chapter.write_text(chapter.read_text() + CASE)
    planted.write_text(planted.read_text() + ROW)
    before = files_of(clone)
    own = {"cwd": clone, "PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1", "code": 0}
    python("docs/make.py", "features", "items", "findings", "drawn", **own)
    made = {name: text for name, text in files_of(clone).items() if before.get(name) != text}
    assert {name.parent for name in made} == {Path("out/docs")}
    page = (clone / "out/docs/features.md").read_text()
    assert "| INPUTS-99 | test_a_batch_of_today (1) | any | all |" in page
    assert re.search(
        r"^suites/test_inputs.py::test_a_batch_of_today\tINPUTS-99\t-\t-\n\tw2$", new_list(made), re.MULTILINE
    )
    table = python("-m", "planted.run", "table", "INPUTS-99", **own).stdout
    assert "test_a_batch_of_today" in table and "a-batch-of-today-is-of-yesterday" in table


def new_list(made):
    (text,) = (text for name, text in made.items() if name.suffix == ".tsv")
    return text.decode()


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


def test_rows(make):
    chapters = contract.read_chapters(CONTRACT)
    items = {
        "suites/test_one.py::test_trains[w2]": item("ONE-1"),
        "suites/test_one.py::test_trains[w4]": item("ONE-1", "grouped-unit"),
        "suites/test_one.py::test_clips[w2]": item("ONE-2", "clipping", "grouped-unit", hardware=["streams"]),
    }
    assert make.problems(chapters, items) == []
    page = make.features(chapters, items)
    assert "| ONE-1 | test_trains (2) | any; some: grouped-unit | all |" in page
    assert "| ONE-2 | test_clips (1) | grouped-unit, clipping, *streams* | reference, torch.fully_shard |" in page
    assert "| ONE | the first | 2 | 2 |" in page


def test_both_ways(make):
    lacking = [f"docs/contract.md: {name} has no case" for name in ("ONE-1", "ONE-2")]
    found = make.problems(contract.read_chapters(CONTRACT), {"test_one.py::test_other[w2]": item("TWO-1")})
    assert found == [*lacking, "suites: a case names TWO-1, which docs/contract.md does not have"]


def test_a_version_with_a_commit_is_closed(make, tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "PACKAGE", tmp_path)
    monkeypatch.setattr(contract, "digest", lambda: "of today")
    collected = make.listing.Collector()
    collected.listed = {"a[w2]": item("ONE-1", "clipping")}
    monkeypatch.setattr(make, "collected", lambda: collected)
    monkeypatch.setattr(contract, "versions", lambda: {"2030.1": "", "2029.1": "c0ffee1"})
    text = "a\tONE-1\tclipping\t-\n\tw2\n"
    assert make.items() == f"of today\n{text}"
    monkeypatch.setattr(contract, "versions", lambda: {"2030.1": "c0ffee1"})
    (tmp_path / "contract-2030.1.tsv").write_text(text)
    assert make.items() == f"of today\n{text}"
    collected.listed = {"a[w4]": item("ONE-1", "clipping")}
    with pytest.raises(ValueError, match=r"2030\.1 is closed, c0ffee1 has its items"):
        make.items()


def test_what_is_committed_is_closed():
    """The list of an open version is made; of a closed one it is a file."""
    lists = {path.name for path in (ROOT / "shardproof").glob("contract-*.tsv")}
    assert lists == {f"contract-{version}.tsv" for version, commit in contract.versions().items() if commit}


def test_a_profile_names_only_what_its_items_have(make):
    text = "| `core` | us | cpu-4 |  | clipping, hybrid | ONE-1, ONE-2 |"
    items = {"a": item("ONE-1", "clipping"), "too many ranks": item("ONE-2", "hybrid", ranks=8)}
    names = [line.rpartition(" ")[2] for line in make.unused(contract.read_profiles(text), items)]
    assert names == ["hybrid", "ONE-2"]
