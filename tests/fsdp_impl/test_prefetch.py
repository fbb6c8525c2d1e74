"""Which gathers are issued when, with and without activation checkpointing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp_impl import fully_shard
from fsdp_impl.common import collectives, unsharded
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import MLP, assert_close, assert_same, average_gradients, batch, plain_copy, tower


def record(rank: Rank) -> list[str]:
    """U: gather, S: reshard of what is unsharded, P: reduction; by unit."""
    events: list[str] = []

    def spy(module: Any, name: str, letter: str) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def wrapper(*args: Any, unit: str, **kwargs: Any) -> Any:
            events.append(letter + unit.replace("(root)", "R"))
            return original(*args, unit=unit, **kwargs)

        rank.monkeypatch.setattr(module, name, wrapper)

    spy(collectives, "gather", "U")
    spy(collectives, "reduce", "P")
    spy(unsharded, "reshard", "S")
    return events


def headed(depth: int = 3) -> nn.Sequential:
    """A tower whose own output is not its last unit's: which of two hooks on one tensor is first would be chance."""
    return nn.Sequential(*tower(4, depth), nn.Tanh())


def take(events: list[str], *, without: str = "") -> str:
    taken = " ".join(event for event in events if event[0] not in without)
    events.clear()
    return taken


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def checkpointed(layer: nn.Module, kind: str) -> nn.Module:
    if kind == "composable":
        composable_checkpoint(layer)
        return layer
    if kind.startswith("wrapper"):
        impl = CheckpointImpl.REENTRANT if kind.endswith("re-entrant") else CheckpointImpl.NO_REENTRANT
        return checkpoint_wrapper(layer, checkpoint_impl=impl)
    return Checkpointed(layer, use_reentrant=kind.endswith("re-entrant"))


KINDS = ["none", "composable", "utils", "utils re-entrant", "wrapper", "wrapper re-entrant"]


@world(2)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_order(rank: Rank, kind: str, inside: bool) -> None:
    """Backward gathers each unit once, ahead of the reduction before it, however forward is run again.

    ``inside``: the unit is what is checkpointed, so that its own forward runs again; else the unit holds that.
    """
    events = record(rank)
    for raf in (None, True, False, 2):
        model = headed()
        plain = plain_copy(model)
        for index in range(1, 4):
            layer = model[index]
            if inside:
                fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=raf)
            if kind != "none":
                model[index] = checkpointed(layer, kind)
            if not inside:
                fully_shard(model[index], mesh=rank.mesh(), reshard_after_forward=raf)
        fully_shard(model, mesh=rank.mesh(), reshard_after_forward=raf)
        names = [unit_name(model, index, inside=inside) for index in range(1, 4)]
        for step in range(2):
            inputs = batch(rank, step, (3, 4))
            loss = model(inputs).square().sum()
            assert take(events, without="S") == "UR U{} U{} U{}".format(*names)
            loss.backward()
            last = {None: "U{2} U{1} P{2} U{0} P{1} P{0} PR", False: "P{2} P{1} P{0} PR"}
            expected = last.get(raf, "UR U{2} U{1} P{2} U{0} P{1} P{0} PR")
            assert take(events, without="S") == expected.format(*names), f"{raf=}"
            plain(inputs).square().sum().backward()
        average_gradients(plain)
        compare(plain, model)


def unit_name(model: nn.Module, index: int, *, inside: bool) -> str:
    layer = model[index]  # type: ignore[index]
    if not inside or isinstance(layer, MLP):
        return str(index)
    return f"{index}.inner" if isinstance(layer, Checkpointed) else f"{index}._checkpoint_wrapped_module"


def compare(plain: nn.Module, model: nn.Module) -> None:
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert_close("gradient", other.grad.full_tensor(), param.grad)


@world(2)
@pytest.mark.parametrize("raf", [True, None, False])
def test_two_forwards_then_one_backward(rank: Rank, raf: bool | None) -> None:
    events = record(rank)
    model = headed()
    for layer in model[1:4]:
        fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=raf)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=raf)
    losses = [model(batch(rank, step, (3, 4))).sum() for step in range(2)]
    first, second = "UR U1 U2 U3", {True: " UR U1 U2 U3", None: " U1 U2 U3", False: ""}
    assert take(events, without="S") == first + second[raf]
    (losses[0] + losses[1]).backward()
    # Autograd hands over a gradient when both graphs have contributed, so the second half reduces for both.
    half, reducing = "U3 U2 U1", "U3 U2 P3 U1 P2 P1 PR"
    expected = {True: f"UR {half} {reducing}", None: f"{half} {reducing}", False: reducing}
    assert take(events, without="S") == expected[raf]


@world(2)
@pytest.mark.parametrize("kind", ["none", "utils", "utils re-entrant"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_forward_prefetch(rank: Rank, ahead: int, kind: str) -> None:
    """Forward gathers ahead; backward, and what it runs again, does not."""
    events = record(rank)
    model = headed(4)
    for index in range(1, 5):
        if kind != "none":
            model[index] = checkpointed(model[index], kind)
        fully_shard(model[index], mesh=rank.mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=True)
    for index in range(1, 5):
        model[index].set_modules_to_forward_prefetch(list(model)[index + 1 : min(index + 1 + ahead, 5)])
    for _ in range(2):
        loss = model(batch(rank, 0, (3, 4))).sum()
        expected = {1: "UR U1 U2 S1 U3 S2 U4 S3 S4 SR", 2: "UR U1 U2 U3 S1 U4 S2 S3 S4 SR"}
        assert take(events) == expected[ahead]
        loss.backward()
        assert take(events) == "UR U4 U3 S4 P4 U2 S3 P3 U1 S2 P2 S1 P1 SR PR"


@world(2)
@pytest.mark.parametrize("ahead", [1, 2])
def test_backward_prefetch(rank: Rank, ahead: int) -> None:
    events = record(rank)
    model = headed(4)
    for index in range(1, 5):
        fully_shard(model[index], mesh=rank.mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=True)
    for index in range(1, 5):
        before = list(model)[max(index - ahead, 1) : index]
        model[index].set_modules_to_backward_prefetch(before[::-1])
    for _ in range(2):
        loss = model(batch(rank, 0, (3, 4))).sum()
        take(events)
        loss.backward()
        expected = {
            1: "UR U4 U3 S4 P4 U2 S3 P3 U1 S2 P2 S1 P1 SR PR",
            2: "UR U4 U3 U2 S4 P4 U1 S3 P3 S2 P2 S1 P1 SR PR",
        }
        assert take(events) == expected[ahead]


@world(2)
def test_a_wrong_prefetch_costs_and_does_no_harm(rank: Rank) -> None:
    """The second layer's backward gathers the last one again; nothing uses it, and it is not used stale."""
    model = tower(4)
    plain = plain_copy(model)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    model[2].set_modules_to_backward_prefetch([model[3]])
    model[1].set_modules_to_forward_prefetch([model[3]])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        inputs = batch(rank, step, (3, 4))
        # Losses only: comparing parameters reshards, which forgets what is in flight.
        losses = [m(inputs).square().sum() for m in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, model)


@world(2)
def test_what_backward_does_not_need_is_not_gathered(rank: Rank) -> None:
    events = record(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plain = plain_copy(model)
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    model[0].set_unshard_in_backward(False)
    tokens = torch.tensor([rank.index, 3, 3], device=rank.device)
    loss = model(tokens).square().sum()
    take(events)
    loss.backward()
    assert take(events, without="S") == "U2 U1 P2 P1 P0"
    plain(tokens).square().sum().backward()
    average_gradients(plain)
    assert_same(plain, model)


@pytest.mark.parametrize("setter", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
@world(1)
def test_only_units_can_be_prefetched(rank: Rank, setter: str) -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=rank.mesh())
    with pytest.raises(ValueError, match=r"Expects FSDPModule but got .*Linear"):
        getattr(model, setter)([nn.Linear(2, 2)])
