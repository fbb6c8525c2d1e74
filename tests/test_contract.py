"""The items of the newest version of the contract, which every torch and implementation has."""

import pytest

from shardproof import contract
from shardproof.harness.adapters.capability import Capability
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


def test_profiles_have_their_items_of_a_closed_version():
    """Its list has names of capabilities that there were, and profiles those that they have become."""
    kept = {hardware: contract.items_of_profile("hsdp", hardware, of="2026.12") for hardware in ("cpu-4", "nccl-2")}
    assert "suites/test_precision.py::test_small_updates[w2]" in kept["cpu-4"] and not kept["nccl-2"]
    needed = {one for version in contract.versions() for item in contract.items(version).values() for one in item.needs}
    assert needed - {one for one in needed if one.startswith("a name for ")} <= {*Capability}
