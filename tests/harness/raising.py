"""References whose forward raises: one is known to run in simulated worlds, of the other nothing is known."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardproof.harness.adapters.reference import ReferenceAdapter


class Raising(ReferenceAdapter):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of this implementation")


class RaisingUntried(Raising):
    traits = dataclasses.replace(Raising.traits, simulates=False)
