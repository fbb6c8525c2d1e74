"""The items of the newest version of the contract, which every torch and implementation has."""

import pytest

from shardproof import contract
from tests.harness.inner import python


@pytest.mark.sampled
@pytest.mark.parametrize(("path", "worlds"), [("suites", ()), ("suites/test_training.py", ("--world", "4"))])
def test_a_run_of_the_version_has_the_items_of_its_list(path, worlds):
    asked = ("--contract", contract.version(), "--impl", "ddp", "--device", "cpu", *worlds, "--collect-only", "-q")
    done = python("-m", "pytest", path, *asked, "-p", "no:cacheprovider", code=0)
    ids = [line.replace("[ddp-", "[", 1) for line in done.stdout.splitlines() if line.startswith("suites/")]
    listed = [id_ for id_, item in contract.items().items() if id_.startswith(path) and (not worlds or item.ranks == 4)]
    assert sorted(ids) == sorted(listed), "python docs/make_features.py writes the list"


@pytest.mark.sampled
def test_a_run_of_a_profile_has_its_items():
    asked = ("--profile", "core", "--impl", "ddp", "--device", "cpu", "--collect-only", "-q")
    done = python("-m", "pytest", "suites", *asked, "-p", "no:cacheprovider", code=0)
    ids = [line.replace("[ddp-", "[", 1) for line in done.stdout.splitlines() if line.startswith("suites/")]
    assert sorted(ids) == sorted(contract.items_of_profile("core", "cpu-4")) and len(ids) > 80


def test_an_item_has_its_needs():
    item = contract.items()["suites/test_overlap.py::test_collectives_run_beside_computation[w4]"]
    assert (item.requirements, item.ranks, item.hardware) == (("OVERLAP-1",), 4, {"streams"})
    assert "sharded" in item.needs
