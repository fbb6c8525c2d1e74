"""The items of the newest version of the contract, which every torch and implementation has."""

import subprocess

import pytest

from shardproof import contract
from shardproof.harness.adapters.capability import EVERY
from tests.harness.inner import python


@pytest.mark.sampled
@pytest.mark.parametrize(("path", "worlds"), [("suites", ()), ("suites/test_training.py", ("--world", "4"))])
def test_a_run_of_the_version_has_the_items_of_its_list(path, worlds):
    asked = ("--contract", contract.version(), "--impl", "ddp", "--device", "cpu", *worlds, "--collect-only", "-q")
    done = python("-m", "pytest", path, *asked, "-p", "no:cacheprovider", code=0)
    ids = [line.replace("[ddp-", "[", 1) for line in done.stdout.splitlines() if line.startswith("suites/")]
    listed = [id_ for id_, item in contract.items().items() if id_.startswith(path) and (not worlds or item.ranks == 4)]
    assert sorted(ids) == sorted(listed)


@pytest.mark.sampled
def test_a_run_of_a_profile_has_its_items():
    asked = ("--profile", "core", "--impl", "ddp", "--device", "cpu", "--collect-only", "-q")
    done = python("-m", "pytest", "suites", *asked, "-p", "no:cacheprovider", code=0)
    ids = [line.replace("[ddp-", "[", 1) for line in done.stdout.splitlines() if line.startswith("suites/")]
    assert sorted(ids) == sorted(contract.items_of_profile("core", "cpu-4")) and len(ids) > 80


LIST = "a\tONE-1\tclipping\t-\n\tw2\n"


@pytest.fixture
def open_version(monkeypatch, tmp_path):
    """An open version, with a folder for its list and sources of today."""
    monkeypatch.setattr(contract, "MADE", tmp_path)
    monkeypatch.setattr(contract, "digest", lambda: "of today")
    contract.items.cache_clear()
    yield contract.list_of("2030.1")
    contract.items.cache_clear()


def test_the_list_of_an_open_version_is_that_of_these_sources(open_version, monkeypatch):
    """One that is kept from other sources is collected anew, and what keeps that from ending is one line."""
    open_version.write_text(f"of today\n{LIST}")
    assert list(contract.items("2030.1")) == ["a[w2]"]
    open_version.write_text(f"of yesterday\n{LIST}")
    contract.items.cache_clear()

    def collect(code, text):
        return lambda command, **_: subprocess.CompletedProcess(command, code, text, "")

    monkeypatch.setattr(subprocess, "run", collect(0, LIST.replace("w2", "w4")))
    assert list(contract.items("2030.1")) == ["a[w4]"]
    contract.items.cache_clear()
    monkeypatch.setattr(subprocess, "run", collect(1, "E   one thing\nE   no module\n"))
    with pytest.raises(contract.NoList, match=r"^contract 2030.1 is open, and .* collected: E   no module$"):
        contract.items("2030.1")


def test_without_torch_the_items_of_an_open_version_are_not_known(open_version, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(contract.NoList, match=r"2030.1 is open: .*, which needs torch and pytest$"):
        contract.items("2030.1")
    assert len(contract.items("2026.12")) == 2870


def test_a_release_has_the_pages_that_were_made_of_its_sources(open_version, monkeypatch):
    """And none that were made of others, or of which some were made later."""
    open_version.with_name("features.md").touch()
    assert contract.made_pages() == []
    open_version.with_name(contract.SOURCES).write_text("of yesterday\n")
    assert contract.made_pages() == []
    open_version.with_name(contract.SOURCES).write_text("of today\n")
    assert [path.name for path in contract.made_pages()] == ["features.md", contract.SOURCES]


def test_an_item_has_its_needs():
    item = contract.items()["suites/test_overlap.py::test_collectives_overlap_with_computation[w4]"]
    assert (item.requirements, item.ranks, item.hardware) == (("OVERLAP-1",), 4, {"streams"})
    assert "sharded" in item.needs


def test_profiles_have_their_items_of_a_closed_version():
    """Its list has names of capabilities that there were, and profiles those that they have become."""
    kept = {hardware: contract.items_of_profile("hsdp", hardware, of="2026.12") for hardware in ("cpu-4", "nccl-2")}
    assert "suites/test_precision.py::test_small_updates[w2]" in kept["cpu-4"] and not kept["nccl-2"]
    needed = {one for version in contract.versions() for item in contract.items(version).values() for one in item.needs}
    assert needed - {one for one in needed if one.startswith("a name for ")} <= EVERY
