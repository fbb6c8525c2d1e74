"""The files of suites/expectations: for known implementations, about cases and findings that there are."""

import re
from pathlib import Path

import pytest

from shardproof.harness.adapters.registry import BUILT_IN
from shardproof.harness.plugin.known_failures import load
from tests.harness.inner import python

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "suites/expectations"
IMPLEMENTATIONS = sorted(path.name.removesuffix(".toml") for path in FOLDER.iterdir())


@pytest.fixture(scope="module")
def case_ids():
    """The ids of all cases, the nightly ones and those of simulated worlds too."""
    listed = "from shardproof import listing\nprint(*listing.collected().items, sep='\\n')"
    return python("-c", listed, code=0).stdout.splitlines()


def test_every_file_is_some_implementations():
    assert set(IMPLEMENTATIONS) <= set(BUILT_IN)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_entry_has_a_case_and_a_finding(name, case_ids):
    """A complete run tells as much, but only of the entries about its own version of torch and type of device."""
    for entry in load(FOLDER, name):
        assert any(map(entry.matches, case_ids)), f"{entry.source} matches no case"
        assert re.fullmatch(r"findings/F\d+\.py", entry.link) and (ROOT / entry.link).is_file(), entry.source
