"""Which implementations can be simulated: each is tried on a small model in a world of two ranks."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config
from shardproof.harness.models import optim
from shardproof.harness.simulation.training import Simulation
from shardproof.harness.simulation.world import simulated_world
from shardproof.harness.tensors import private

#: The most characters of an error that are shown.
_MOST = 200

_reasons: dict[type[Adapter], str | None] = {}


def why_not(implementation: type[Adapter]) -> str | None:
    """Return why an implementation cannot be simulated, in one line, or None if it can.

    It shards and trains two layers for two steps, without anything that a case may vary. What fails there fails
    because values do not exist, or because other ranks do not. The answer is kept for this process.

    Raises:
        Exception: torch lacks a private name that simulation needs, which is not the implementation's fault.
    """
    if implementation not in _reasons:
        _reasons[implementation] = _try(implementation)
    return _reasons[implementation]


def _try(implementation: type[Adapter]) -> str | None:
    try:
        with simulated_world(2, rank=1) as world:
            one = Simulation(world, implementation, _layers, config=Config(mesh=world.mesh()), optimizer=optim.sgd())
            for _ in range(2):
                one.step(lambda: (torch.zeros(2, 4),), loss=torch.mean)
            one.close()
    except Exception as error:
        if private.complaint_of(error):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}"[:_MOST]
    return None


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
