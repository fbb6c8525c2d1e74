"""A model that nobody has any more is freed at once, without the garbage collector: nothing in it is a cycle.

What waits for the garbage collector, as models of torch 2.13's ``fully_shard`` do, holds device memory that the next
model needs.
"""

import functools
import gc
import importlib
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_impl
from fsdp_impl import fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.harness.tensors import memory
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, wrap_children
from tests.fsdp_impl.replicas import batch, tower

Make = Callable[[Rank], Any]
Use = Callable[[Rank, Any], Any]


@contextmanager
def without_collection() -> Iterator[None]:
    # The first call of a function that stays outside graphs imports it, which leaves the caller's frame in a circle.
    importlib.import_module("torch._dynamo")
    memory.collect_garbage()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def storages() -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors that Python knows, by their identity."""
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


def parts(model: nn.Module) -> list[Any]:
    """Modules, units, parameters, and of a DTensor its shard."""
    units = [module._unit for module in model.modules() if hasattr(module, "_unit")]
    shards = [getattr(param, "_local_tensor", param) for param in model.parameters()]
    return [*model.modules(), *(unit() if callable(unit) else unit for unit in units), *model.parameters(), *shards]


def check(rank: Rank, make: Make, use: Use) -> None:
    use(rank, make(rank))  # what torch keeps after its first use
    with without_collection():
        before = storages()
        model = make(rank)
        found = parts(model)
        left = use(rank, model)
        found += parts(model)
        alive = [(type(one).__name__, weakref.ref(one)) for one in found]
        held = [StorageWeakRef(storage) for key, storage in storages().items() if key not in before]
        assert len(held) >= 3
        del model, left, found
        # A thread of gloo may hold the tensors of a collective for a moment after it has ended.
        deadline = time.monotonic() + 10
        while not all(storage.expired() for storage in held) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [name for name, one in alive if one() is not None] == []
        assert all(storage.expired() for storage in held)


# What is done with a model, besides what the cases of MEMORY-4 do; what is returned lives as long


def steps(rank: Rank, model: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(2):
        output = model(batch(rank, number, (2, 4)))
        output.sum().backward()
        optimizer.step()
    return optimizer, output


def around(rank: Rank, model: Any) -> Any:
    """What happens between steps."""
    with model.no_sync():
        model(batch(rank, 0, (2, 4))).sum().backward()
    with fsdp_impl.FullyShardedDataParallel.summon_full_params(model):
        pass
    model.load_state_dict(model.state_dict())
    model.clip_grad_norm_(1.0)
    return model.to(torch.float64)


def by_hand(rank: Rank, model: Any) -> Any:
    """What a script asks of units and of their collectives."""
    first, second = (module for module in list(model.modules())[:3] if hasattr(module, "unshard"))
    for one, other in ((first, second), (second, first)):
        one.set_modules_to_forward_prefetch([other])
        one.set_modules_to_backward_prefetch([other])
    fsdp_impl.validate_order(model)
    for number in range(3):
        model.set_requires_gradient_sync(number == 1)
        model(batch(rank, number, (2, 4))).sum().backward()
    model.set_requires_all_reduce(False)
    left = steps(rank, model)
    model.unshard()
    model.state_dict()
    model.unshard(async_op=True)
    return left


# Under FullyShardedDataParallel

FLAT: dict[str, dict[str, Any]] = {
    "full": {"sharding_strategy": FULL},
    "kept": {"sharding_strategy": ZERO2},
    "not sharded": {"sharding_strategy": NONE},
    "low precision": {"mixed_precision": fsdp_impl.MixedPrecision(param_dtype=torch.bfloat16)},
    "offloaded": {"cpu_offload": fsdp_impl.CPUOffload(offload_params=True)},
    "prefetching": {"forward_prefetch": True, "backward_prefetch": fsdp_impl.BackwardPrefetch.BACKWARD_POST},
}


@world(2)
@pytest.mark.parametrize("use", [steps, around])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("options", FLAT)
def test_a_deleted_model_of_wrappers_is_freed(rank: Rank, options: str, use_orig_params: bool, use: Use) -> None:
    chosen = {"device_id": rank.device, "use_orig_params": use_orig_params, **FLAT[options]}
    check(rank, lambda rank: wrap_children(tower(4, 2), **chosen), use)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_inner_wrapper_keeps_no_other(rank: Rank, use_orig_params: bool) -> None:
    """A part of a model that is kept does not keep the rest."""
    with without_collection():
        options = {"device_id": rank.device, "use_orig_params": use_orig_params, "forward_prefetch": True}
        model = wrap_children(tower(4, 2), **options)
        steps(rank, model)
        inner = model[1]
        others = [weakref.ref(unit) for unit in model.fsdp_modules(model) if unit is not inner]
        flat = [weakref.ref(unit()._unit.group.shards.flat) for unit in others]
        del model
        assert [reference() for reference in (*others, *flat) if reference() is not None] == []
        inner(batch(rank, 0, (2, 4))).sum().backward()


# Under fully_shard

FORMS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "in two sizes": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": fsdp_impl.CPUOffloadPolicy(pin_memory=False)},
    "low precision": {"mp_policy": fsdp_impl.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def sharded(rank: Rank, **options: Any) -> nn.Module:
    """Two units, of which the first has two modules with a parameter in common; with four ranks they have replicas."""
    model = tower(4, 3).to(rank.device)
    model[2].in_proj.weight = model[1].in_proj.weight
    mesh = rank.mesh() if rank.world_size == 2 else rank.mesh((2, 2), ("replicate", "shard"))
    for unit in ([model[1], model[2]], model[3]):
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@world(2, 4)
@pytest.mark.parametrize("use", [steps, by_hand])
@pytest.mark.parametrize("form", FORMS)
def test_a_deleted_model_is_freed(rank: Rank, form: str, use: Use) -> None:
    check(rank, functools.partial(sharded, **FORMS[form]), use)
