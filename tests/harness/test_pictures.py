"""Taking a picture reads: state, memory, streams and trace are the same with and without."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Adapter, Clip
from shardproof.harness.judging.elements import exact_difference
from shardproof.harness.models import optim
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Snapshots
from shardproof.harness.tensors.memory import held_bytes
from shardproof.testing import models, world

IN_PLACE = ["reference", "reference.flat", "torch.fully_shard", "torch.fsdp", "ddp"]


def registered(adapter: Adapter) -> list[tuple[Any, ...]]:
    """What a module shows of each parameter, with its memory."""
    found = []
    for name, value in adapter.module.named_parameters():
        local = value.to_local() if hasattr(value, "to_local") else value
        storage = local.untyped_storage()
        found.append((name, id(value), type(value), tuple(local.shape), storage.data_ptr(), storage.nbytes()))
    return found


@contextlib.contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Raise an error where the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def device_bytes(device: torch.device) -> int:
    """The bytes in the device's memory; 0 on the CPU, where gloo's threads keep tensors of their last collectives."""
    return held_bytes(device) if device.type != "cpu" else 0


@world(2)
@pytest.mark.parametrize("implementation", IN_PLACE)
@pytest.mark.parametrize("keeps", [True, False])
def test_reading_leaves_everything_as_it_is(rank: Rank, implementation: str, keeps: bool) -> None:
    """In the midst of a step, where units may be gathered, and between steps."""
    rank.implementation = registry.load(implementation)
    if implementation == "ddp" and keeps:
        keeps = False  # it has no such choice
    options: dict[str, Any] = {"reshard_after_forward": False} if keeps else {}
    run = rank.run(models.Tower(dim=9), units=models.Tower(dim=9).units(), optimizer=optim.adamw(), **options)
    issued: list[Any] = []

    def read(_: Any = None) -> None:
        before = registered(run.adapter)
        with no_wait(rank.device), rank.announcer.heard_by(issued.append, phase="reading"):
            run.adapter.gradients()
            run.adapter.parameters()
            run.adapter.optimizer_state()
        assert registered(run.adapter) == before, "reading changed what the module shows"
        assert not issued, f"reading issued collectives: {issued}"

    for step in range(2):
        batch = rank.batch(step, (4, 9))
        with run.adapter.microbatch(is_last=True):
            output = run.adapter.forward(batch)
            read()
            run.adapter.backward(models.mean_square(output))
        read()
        run.adapter.step()
        read()
        run.adapter.zero_grad(set_to_none=True)


@world(2)
@pytest.mark.parametrize("implementation", IN_PLACE)
def test_a_run_with_pictures_is_one_without(rank: Rank, implementation: str) -> None:
    """The same bits, the same collectives, and, without what the pictures hold, the same memory."""
    rank.implementation = registry.load(implementation)
    model = models.Tower(dim=9)
    runs = [
        rank.run(models.copy_of(model), units=model.units(), optimizer=optim.sgd(), clip=Clip(0.01), pictures=pictures)
        # The first run makes a device allocate workspaces that stay.
        for pictures in (False, True, False)
    ]
    held = []

    for run in runs:
        before = device_bytes(rank.device)
        for step in range(3):
            run.step([(rank.batch(step, (4, 9)),)], loss=models.mean_square)
        run._snapshots = Snapshots()
        held.append(device_bytes(rank.device) - before)
    _, with_pictures, without = runs
    assert with_pictures.trace == without.trace
    # DDP's reducer gives its buckets back whenever it is collected.
    assert held[1] == held[2] or implementation == "ddp", f"bytes with and without pictures: {held[1:]}"
    others = without.adapter.parameters()
    for name, piece in with_pictures.adapter.parameters().items():
        assert exact_difference(piece.tensor, others[name].tensor) is None, name


def test_copies_go_to_memory_that_was_reserved_before() -> None:
    snapshots = Snapshots()
    tensor = torch.arange(6.0).view(2, 3)
    first = snapshots.copy("weight", tensor)
    snapshots.reserve()
    (reserved,) = (one.data_ptr() for one in snapshots._reserved.values())
    second = snapshots.copy("weight", tensor + 1)
    assert second.data_ptr() == reserved
    assert torch.equal(first, tensor), "an earlier copy has been overwritten"
    assert torch.equal(second, tensor + 1)
    snapshots.reserve()
    assert torch.equal(snapshots.copy("weight", tensor[0]), tensor[0]), "a tensor of another shape is cloned"
    assert torch.equal(second, tensor + 1)
