"""A model that is deleted gives its memory back at once, without the garbage collector: nothing in it is a cycle.

torch 2.13's own ``fully_shard`` keeps it until a collection.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_impl import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    validate_order,
)
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import batch, tower
from tests.fsdp_impl.test_flat_lifetime import without_collection

Make = Callable[[Rank], nn.Module]
Use = Callable[[Rank, nn.Module], None]


class Alive:
    """Weak references to all that a model holds: modules, units, parameters and the memory of their shards."""

    def __init__(self, model: nn.Module) -> None:
        self.objects: list[weakref.ref[Any]] = []
        self.storages: list[StorageWeakRef] = []
        self.see(model)

    def see(self, model: nn.Module) -> None:
        for module in model.modules():
            self.objects.append(weakref.ref(module))
            if hasattr(module, "_unit"):
                self.objects.append(weakref.ref(module._unit()))
        for param in model.parameters():
            self.objects.append(weakref.ref(param))
            self.storages.append(StorageWeakRef(getattr(param, "_local_tensor", param).untyped_storage()))

    def found(self) -> list[str]:
        objects = [type(one()).__name__ for one in self.objects if one() is not None]
        return objects + ["storage" for one in self.storages if not one.expired()]


def sharded(rank: Rank, **options: Any) -> nn.Module:
    model = tower(4, 2).to(rank.device)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh(), **options)
    return fully_shard(model, mesh=rank.mesh(), **options)


def kept(rank: Rank) -> nn.Module:
    return sharded(rank, reshard_after_forward=False)


def in_two_sizes(rank: Rank) -> nn.Module:
    return sharded(rank, reshard_after_forward=2)


def offloaded(rank: Rank) -> nn.Module:
    return sharded(rank, offload_policy=CPUOffloadPolicy(pin_memory=False))


def in_low_precision(rank: Rank) -> nn.Module:
    return sharded(rank, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def with_replicas(rank: Rank) -> nn.Module:
    mesh = rank.mesh((2, rank.world_size // 2), ("replicate", "shard"))
    model = tower(4, 2).to(rank.device)
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_several_modules(rank: Rank) -> nn.Module:
    model = tower(4, 3).to(rank.device)
    fully_shard([model[1], model[2]], mesh=rank.mesh())
    return fully_shard(model, mesh=rank.mesh())


def tied(rank: Rank) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(rank.device)
    model[2].weight = model[0].weight
    return fully_shard(model, mesh=rank.mesh())


def made(rank: Rank, model: nn.Module) -> None:
    pass


def forward(rank: Rank, model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(rank, 0, (2, 4)))


def forward_with_graph(rank: Rank, model: nn.Module) -> None:
    model(batch(rank, 0, (2, 4)))


def steps(rank: Rank, model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(2):
        outputs = model(batch(rank, number, (2, 4)))
        outputs.sum().backward()
        optimizer.step()


def steps_with_prefetch(rank: Rank, model: nn.Module) -> None:
    first, second = (module for module in list(model.modules())[:3] if hasattr(module, "unshard"))
    for one, other in ((first, second), (second, first)):
        one.set_modules_to_forward_prefetch([other])
        one.set_modules_to_backward_prefetch([other])
    steps(rank, model)


def accumulation(rank: Rank, model: nn.Module) -> None:
    for number in range(3):
        model.set_requires_gradient_sync(number == 1)  # type: ignore[operator]
        model(batch(rank, number, (2, 4))).sum().backward()


def replicas_not_reduced(rank: Rank, model: nn.Module) -> None:
    model.set_requires_all_reduce(False)  # type: ignore[operator]
    model(batch(rank, 0, (2, 4))).sum().backward()


def unsharded_by_hand(rank: Rank, model: nn.Module) -> None:
    model.unshard()  # type: ignore[operator]
    model.state_dict()
    model.unshard(async_op=True)  # type: ignore[operator]


def checked(rank: Rank, model: nn.Module) -> None:
    validate_order(model)
    steps(rank, model)


def check(rank: Rank, make: Make, use: Use) -> None:
    use(rank, make(rank))  # what torch keeps after its first use
    with without_collection():
        model = make(rank)
        alive = Alive(model)
        use(rank, model)
        alive.see(model)
        del model
        # A thread of gloo may hold the tensors of a collective for a moment after it has ended.
        deadline = time.monotonic() + 5
        while alive.found() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alive.found() == []


USES = [made, forward, forward_with_graph, steps, accumulation, unsharded_by_hand, checked]


@world(2)
@pytest.mark.parametrize("use", [*USES, steps_with_prefetch])
@pytest.mark.parametrize("make", [sharded, kept])
def test_a_deleted_model_is_freed(rank: Rank, make: Make, use: Use) -> None:
    check(rank, make, use)


@world(2)
@pytest.mark.parametrize("use", [forward_with_graph, steps])
@pytest.mark.parametrize("make", [in_two_sizes, offloaded, in_low_precision, of_several_modules, tied])
def test_in_every_form(rank: Rank, make: Make, use: Use) -> None:
    check(rank, make, use)


@world(4)
@pytest.mark.parametrize("use", [steps, replicas_not_reduced])
def test_with_replicas(rank: Rank, use: Use) -> None:
    check(rank, with_replicas, use)
