"""The versions of the contract, which code refuses, and the items of the newest, the same for all implementations."""

import pytest

from shardproof import contract
from tests.harness.inner import python


def test_a_version_that_this_code_does_not_have_is_one_line(monkeypatch):
    newest = contract.version()
    monkeypatch.setattr(contract, "versions", lambda: {newest: "", "2025.6": "c0ffee1"})
    contract.check(newest)
    with pytest.raises(ValueError, match=rf"^this is version {newest} of the contract; commit c0ffee1 has 2025\.6$"):
        contract.check("2025.6")
    with pytest.raises(ValueError, match=rf"^the contract has no version 1; there is {newest}, 2025\.6$"):
        contract.check("1")


@pytest.mark.sampled
@pytest.mark.parametrize(("path", "worlds"), [("suites", ()), ("suites/test_training.py", ("--world", "4"))])
def test_a_run_of_the_version_has_the_items_of_its_list(path, worlds):
    """A choice of worlds leaves items out and, unlike ``--effort standard``, puts no others in their place."""
    asked = ("--contract", contract.version(), "--impl", "ddp", "--device", "cpu", *worlds, "--collect-only", "-q")
    done = python("-m", "pytest", path, *asked, "-p", "no:cacheprovider", code=0)
    ids = [line.replace("[ddp-", "[", 1) for line in done.stdout.splitlines() if line.startswith("suites/")]
    listed = [id_ for id_, item in contract.items().items() if id_.startswith(path) and (not worlds or item.ranks == 4)]
    assert sorted(ids) == sorted(listed), "python docs/make_features.py writes the list"


def test_an_item_knows_its_needs_and_its_class():
    item = contract.items()["suites/test_overlap.py::test_collectives_run_beside_computation[w4]"]
    assert (item.ranks, item.hardware) == (4, frozenset({"streams"}))
    assert "sharded" in item.needs
    assert not any(one.has(item) for one in contract.CLASSES.values())
    two = contract.items()["suites/test_overlap.py::test_collectives_run_beside_computation[w2]"]
    assert [name for name, one in contract.CLASSES.items() if one.has(two)] == ["nccl-2"]
