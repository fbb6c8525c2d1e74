"""Cases that run for real and simulated, on the same rank: what both issue and hold is the same, exactly.

``test_simulated_as_real.py`` runs them; no chapter has them, because they check the simulation and no implementation.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from shardproof.harness.adapters.base import Accumulation, Clip, Precision
from shardproof.harness.models import optim, parallel
from shardproof.harness.models.shapes import WIDTH, Rows
from shardproof.harness.parity.rank import Rank
from shardproof.testing import Capability, models, needs, world

MIXED = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNITS = [[f"layers.{index}"] for index in range(4)]
SETTINGS: dict[str, tuple[dict[str, Any], list[Capability]]] = {
    "plain": ({"clip": Clip(1e-3)}, [Capability.CLIPPING]),
    "kept": ({"reshard_after_forward": False}, [Capability.RESHARD_AFTER_FORWARD]),
    "to-two": ({"reshard_after_forward": 2}, [Capability.RESHARD_TO_SIZE]),
    "mixed": ({"precision": MIXED}, [*MIXED.needs()]),
    "accumulated": ({"microbatches": 2, "accumulation": Accumulation()}, [Capability.DEFERRED_REDUCTION]),
}


def plain_fields(items: Any) -> list[tuple[Any, ...]]:
    """What collectives are, without the labels of units, which follow from their bytes."""
    return [dataclasses.astuple(dataclasses.replace(item, unit="")) for item in items]


@world(2, 4)
@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=needs(*wanted)) for name, (_, wanted) in SETTINGS.items()]
)
def test_one_dimension(rank: Rank, setting: str) -> None:
    compare(rank, None, ("dp",), **SETTINGS[setting][0])


@world(4)
@needs(Capability.HYBRID)
def test_replicas(rank: Rank) -> None:
    compare(rank, (2, 2), ("replicate", "shard"))


def compare(rank: Rank, shape: tuple[int, ...] | None, names: tuple[str, ...], **options: Any) -> None:
    """Train two real steps, simulate this rank, train a third real step, and compare."""
    size = rank.world_size
    options |= {"units": UNITS, "optimizer": optim.adam()}
    run = rank.run(Rows(size), mesh=rank.mesh(shape, names), pictures=False, must_clip=None, **options)
    microbatches = options.get("microbatches", 1)

    def train(step: int) -> list[tuple[Any, ...]]:
        run.trace.clear()
        batches = [(rank.batch(step, (2, WIDTH), microbatch=number),) for number in range(microbatches)]
        run.step(batches, loss=models.mean_square)
        return plain_fields(run.trace)

    real = [train(step) for step in range(2)]
    with rank.simulated(rank.index, size=size) as simulated:
        one = rank.simulation(
            simulated, functools.partial(Rows, size), mesh=simulated.mesh(shape, names),
            as_on_a_device=rank.device.type != "cpu", **options,
        )  # fmt: skip
        steps = [one.step(lambda: (torch.zeros(2, WIDTH),), loss=models.mean_square) for _ in range(2)]
        layout, state = one.layout(), one.optimizer_layout()
        one.close()
    for number, (trace, expected) in enumerate(zip(steps, real, strict=True)):
        found = plain_fields(trace)
        assert found == expected, f"step {number}: simulated {found}, real {expected}"
    assert train(2) == real[1], "the world is another one after the simulation"
    held = {name: tuple(piece.tensor.shape) for name, piece in run.adapter.parameters().items()}
    assert {name: part.shape for name, part in layout.items()} == held
    real_state = run.adapter.optimizer_state()
    assert real_state is not None
    assert {name: {key: part.shape for key, part in parts.items()} for name, parts in state.items()} == {
        name: {key: tuple(piece.tensor.shape) for key, piece in parts.items()} for name, parts in real_state.items()
    }


@world(4)
@needs(Capability.TENSOR_PARALLEL)
def test_tensor_parallel(rank: Rank) -> None:
    names = ("shard", "tensor")
    traces = []
    real = rank.mesh((2, 2), names)
    run = rank.run(
        parallel.MLPStack(16), mesh=real["shard"], units=UNITS[:3], optimizer=optim.sgd(), pictures=False,
        prepare=functools.partial(parallel.parallelize_mlps, mesh=real["tensor"]),
    )  # fmt: skip
    for step in range(2):
        run.trace.clear()
        run.step([(rank.batch(step, (2, 16), mesh=real["shard"]),)], loss=models.mean_square)
        traces.append(plain_fields(run.trace))
    with rank.simulated(rank.index, size=4) as simulated:
        mesh = simulated.mesh((2, 2), names)
        one = rank.simulation(
            simulated, functools.partial(parallel.MLPStack, 16), mesh=mesh["shard"], units=UNITS[:3],
            optimizer=optim.sgd(), prepare=functools.partial(parallel.parallelize_mlps, mesh=mesh["tensor"]),
            as_on_a_device=rank.device.type != "cpu",
        )  # fmt: skip
        for expected in traces:
            found = plain_fields(one.step(lambda: (torch.zeros(2, 16),), loss=models.mean_square))
            assert found == expected, f"simulated {found}, real {expected}"
        one.close()
