"""The harness of shardproof: worlds of ranks, parity with a baseline, and verdicts with reasons.

What a case module imports lives here and is light: no torch, because pytest loads the
plugin in every run of an environment that has shardproof installed.
"""

from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.plugin.marks import alone, contract, deadline, needs, seed, world

__all__ = ["Capability", "Hardware", "alone", "contract", "deadline", "needs", "seed", "world"]
