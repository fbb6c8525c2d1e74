"""How long, and in how much memory, one rank of a large world is simulated: the 0.94 B transformer, two steps.

python -m benchmarks.simulation --impl torch.fully_shard --ranks 4096
"""

from __future__ import annotations

import argparse
import functools
import resource
import time

import torch
from torch.nn import functional

from benchmarks.training.models import LARGE, Transformer
from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Clip, Config
from shardproof.harness.models import optim
from shardproof.harness.simulation.traffic import Shape, by_group
from shardproof.harness.simulation.training import Simulation
from shardproof.harness.simulation.world import simulated_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", default="reference")
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--replicas", type=int, default=1)
    asked = parser.parse_args()
    sizes, names = (asked.ranks,), ("shard",)
    if asked.replicas > 1:
        sizes, names = (asked.replicas, asked.ranks // asked.replicas), ("replicate", "shard")
    began = time.perf_counter()
    with simulated_world(asked.ranks, rank=1) as world:
        config = Config(
            mesh=world.mesh(sizes, names), units=tuple((f"layers.{i}",) for i in range(LARGE.layers)), clip=Clip(1.0)
        )
        one = Simulation(
            world, registry.load(asked.impl), functools.partial(Transformer, LARGE), config=config,
            optimizer=optim.adamw(kernels="foreach"),
        )  # fmt: skip
        for _ in range(2):
            trace = one.step(inputs, loss=loss)
        for phase, usage in one.ledger.peaks(step=1).items():
            kinds = ", ".join(f"{kind} {nbytes / 2**20:,.1f}" for kind, nbytes in usage.by_kind.items())
            print(f"{phase:<9} {usage.total / 2**20:>9,.1f} MiB: {kinds}")
        for (phase, kind, dimensions), volume in by_group(trace, Shape(sizes, names, rank=1)).items():
            print(f"{phase:<9} {volume.count:>3} {kind} over {dimensions}: {volume.nbytes:,} bytes")
        one.close()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{asked.impl}, {asked.ranks} ranks: {time.perf_counter() - began:.1f} s,")
    print(
        f"{used.ru_utime + used.ru_stime:.1f} s of a core, {used.ru_maxrss / 2**20:.2f} GiB at most, imports included"
    )


def inputs() -> tuple[torch.Tensor]:
    """One sequence of tokens."""
    return (torch.zeros(1, LARGE.length, dtype=torch.int64),)


def loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next tokens."""
    flat = logits.flatten(0, 1).float()
    return functional.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64))


if __name__ == "__main__":
    main()
