"""The marks and the capabilities of cases: the one import of a case.

It imports no torch: a case module is collected in processes that run no case.
"""

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
