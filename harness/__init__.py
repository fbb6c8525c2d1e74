"""The harness of shardproof: runs cases on worlds of ranks and compares sharded training with a baseline.

Case modules import their marks and capabilities from here. This module imports no torch, because the pytest plugin
imports it in every run of a project that names the plugin, even where no case is collected.
"""

if __name__ != "shardproof.harness":
    # From the root of a clone the folder could be imported by a second name, and every class in it would exist twice.
    raise ImportError(f"{__name__} is imported as shardproof.{__name__}")

from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.plugin.marks import (
    alone,
    contract,
    deadline,
    drawn,
    each_value,
    meaningful_from,
    needs,
    simulated,
    world,
)

__all__ = [
    "Capability",
    "Hardware",
    "alone",
    "contract",
    "deadline",
    "drawn",
    "each_value",
    "meaningful_from",
    "needs",
    "simulated",
    "world",
]
