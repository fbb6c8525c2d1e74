"""A model under ``FullyShardedDataParallel`` that nobody has any more is freed at once, without the garbage collector.

Units, their hooks and their parameters must not refer to each other in a circle: what waits for the garbage collector
holds device memory that the next model needs.
"""

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

from fsdp_impl import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision
from shardproof.harness.parity.rank import Rank
from shardproof.harness.tensors import memory
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, wrap_children
from tests.fsdp_impl.replicas import batch, tower


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


def released(held: list[StorageWeakRef]) -> bool:
    """Whether all storages are freed. The threads of gloo hold what they have sent for a moment longer."""
    deadline = time.monotonic() + 10
    while not all(reference.expired() for reference in held) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(reference.expired() for reference in held)


def nothing(rank: Rank, model: nn.Module) -> Any:
    return None


def forward(rank: Rank, model: nn.Module) -> Any:
    return model(batch(rank, 0, (2, 4)))


def evaluation(rank: Rank, model: nn.Module) -> Any:
    with torch.no_grad():
        return model.eval()(batch(rank, 0, (2, 4)))


def steps(rank: Rank, model: nn.Module) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(2):
        output = model(batch(rank, number, (2, 4)))
        output.sum().backward()
        optimizer.step()
    return optimizer, output


def microbatches(rank: Rank, model: Any) -> Any:
    with model.no_sync():
        return forward(rank, model).sum().backward()


def around(rank: Rank, model: Any) -> Any:
    """What happens between steps."""
    with FullyShardedDataParallel.summon_full_params(model):
        pass
    model.load_state_dict(model.state_dict())
    model.clip_grad_norm_(1.0)
    return model.to(torch.float64)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "full": {"sharding_strategy": FULL},
    "kept": {"sharding_strategy": ZERO2},
    "not sharded": {"sharding_strategy": NONE},
    "low precision": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
    "prefetching": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
}


@world(2)
@pytest.mark.parametrize("use", [nothing, forward, evaluation, steps, microbatches, around])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_no_circle_holds_a_deleted_model(
    rank: Rank, options: str, use_orig_params: bool, use: Callable[[Rank, Any], Any]
) -> None:
    with without_collection():
        before = storages()
        model = wrap_children(
            tower(4, 2), device_id=rank.device, use_orig_params=use_orig_params, **CONFIGURATIONS[options]
        )
        left = use(rank, model)
        objects = [*model.modules(), *model.parameters(), *(inner._unit for inner in model.fsdp_modules(model))]
        references = [(type(found).__name__, weakref.ref(found)) for found in objects]
        held = [StorageWeakRef(storage) for key, storage in storages().items() if key not in before]
        assert len(held) >= 3
        del model, left, objects
        assert [name for name, reference in references if reference() is not None] == []
        assert released(held)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_inner_unit_keeps_no_other(rank: Rank, use_orig_params: bool) -> None:
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
