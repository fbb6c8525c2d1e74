"""Cases ask for no more than they need: an implementation that declares nothing is asked most of what is for any."""

import json
import os
import re
from pathlib import Path

import pytest

from shardproof.harness.adapters.base import Adapter, Traits
from shardproof.harness.plugin import cases
from shardproof.harness.plugin.state import STATE
from tests.harness.inner import python

ROOT = Path(__file__).parents[1]


class Minimal(Adapter):
    name = "minimal"
    traits = Traits(shards=frozenset({"optimizer"}))

    @classmethod
    def availability(cls, device_type):
        return None

    @classmethod
    def capabilities(cls):
        return frozenset()

    def __init__(self, model, *, optimizer, config):
        super().__init__(model, optimizer=optimizer, config=config)

    def gradients(self):
        return {}

    def parameters(self):
        return {}


def pytest_collection_finish(session):
    """As a plugin: write the requirements of the cases that would run to the file ASKED."""
    selection = session.config.stash[STATE].selection
    running = [item for item in session.items if cases.missing(item, selection) is None]
    asked = {name for item in running for mark in item.iter_markers("contract") for name in mark.args}
    with open(os.environ["ASKED"], "w") as file:
        json.dump(sorted(asked), file)


@pytest.mark.nightly
def test_an_adapter_that_declares_nothing_is_asked_two_thirds_of_what_is_for_any(tmp_path):
    contract = (ROOT / "docs/contract.md").read_text()
    marked = set(re.findall(r"^\| ([A-Z]+-\d+) \| any \|", contract, flags=re.MULTILINE))
    options = ["--impl", "tests.test_needs_of_cases:Minimal", "--device", "cpu", "--world", "1,2,4"]
    plugin = ["-p", "no:cacheprovider", "-p", "tests.test_needs_of_cases"]
    python("-m", "pytest", "suites", "--co", "-q", *plugin, *options, ASKED=str(tmp_path / "asked"), code=0)
    asked = set(json.loads((tmp_path / "asked").read_text()))
    assert len(marked) > 20
    assert 3 * len(marked & asked) >= 2 * len(marked), f"not asked: {sorted(marked - asked)}"
