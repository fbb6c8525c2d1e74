"""Chapter RANDOM: random numbers, of which sharding draws none."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.axes import KEEPS
from shardproof.testing.casts import check_equal, run_and_replica
from shardproof.testing.compare import step_label
from shardproof.testing.make import run_by_units
from shardproof.testing.train import Means, optim, recompute

pytestmark = world(2)

SHAPE = (7, 5)
MEANS: tuple[Means, ...] = ("hooks", "wrapper", "call", "reentrant-call")


class Dropping(nn.Module):
    """``dropout(x * weight) + shift``, element by element; half of the products are dropped."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.shift = nn.Parameter(torch.randn(rows, columns))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dropout(x * self.weight) + self.shift
        return output


class DroppingStack(models.Stacked):
    """A parameter and a dropout of the root, and two units of :class:`Dropping`."""

    def __init__(self, rows: int = 7, columns: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping(rows, columns) for _ in range(2))
        self.gain = nn.Parameter(torch.randn(rows, columns))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_layers(self.dropout(x * self.gain))


@contract("RANDOM-1")
@KEEPS
@pytest.mark.parametrize("means", [None, *(pytest.param(one, marks=needs(Capability.RECOMPUTATION)) for one in MEANS)])
def test_masks_of_dropout(rank: Rank, means: Means | None, reshard_after_forward: bool | None) -> None:
    """Every rank's masks are those of an unsharded run that began with the same state of the generator."""
    model = DroppingStack(*SHAPE)
    # Every rank has different masks.
    torch.manual_seed(rank.seeds.init + rank.index)
    generators = [Generator(rank.device), Generator(rank.device)]
    with generators[0].in_use():
        prepare = functools.partial(recompute, means=means) if means else None
        options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, "prepare": prepare}
        run, replica = run_and_replica(rank, model, units=model.units(), optimizer=optim.sgd(), **options)
    for step in range(3):
        batch = [(rank.batch(step, SHAPE),)]
        with generators[1].in_use():
            expected = replica.step(batch, loss=torch.sum)
        with generators[0].in_use():
            found = run.step(batch, loss=torch.sum)
        check_equal(rank, run, found, expected, number=step)
        generators[0].check(generators[1], f"after {step_label(step)}")


@contract("RANDOM-1")
@needs(Capability.DISTRIBUTED_CHECKPOINT)
def test_state_dicts_draw_nothing(rank: Rank) -> None:
    """Taking and loading state dicts draws no random number, before the first step and between steps."""
    run = run_by_units(rank, DroppingStack(*SHAPE), optimizer=optim.adamw())
    for step in range(2):
        before, after = Generator(rank.device), Generator(rank.device)
        with after.in_use():
            run.adapter.restore(run.adapter.checkpoint())
        after.check(before, f"after state dicts before {step_label(step)}")
        run.step([(rank.batch(step, SHAPE),)], loss=torch.sum)


class Generator:
    """A copy of the states of this process's generators: of the CPU, and of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._read()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the block draw from this copy, and afterwards have the process's states again."""
        before = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._states = self._read()
            self._write(before)

    def check(self, expected: "Generator", when: str) -> None:
        """Check that as many numbers were drawn as from another copy."""
        for kind, mine, other in zip(("CPU", "device"), self._states, expected._states, strict=False):
            assert torch.equal(mine, other), (
                f"{when}: the generator of the {kind} has another state than the baseline's"
            )

    def _read(self) -> list[torch.Tensor]:
        if self._device.type == "cpu":
            return [torch.get_rng_state()]
        return [torch.get_rng_state(), torch.get_device_module(self._device).get_rng_state(self._device)]

    def _write(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)
