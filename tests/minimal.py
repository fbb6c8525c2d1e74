"""An adapter that declares nothing but that it trains, and what the suites ask of it."""

from __future__ import annotations

import json
import os

from shardproof.harness.adapters.base import Adapter, Traits
from shardproof.harness.plugin import cases
from shardproof.harness.plugin.state import STATE


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
