"""Chapter MEMORY: what calls of user code and steps of other optimizers leave in memory."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardproof.suites.anytime import FAMILIES, STEPPED, Held, Scene
from shardproof.testing import Capability, Hardware, Rank, contract, models, needs, world
from shardproof.testing.make import Clip, Precision, run_by_units, sharded
from shardproof.testing.measure import memory
from shardproof.testing.train import optim

pytestmark = [needs(Capability.SHARDED, Capability.OWN_OPTIMIZER), world(2)]

UNITS = needs(Capability.MANUAL_RESHARD, Capability.ASYNC_UNSHARD)
WRAPPERS = needs(Capability.FSDP1_API)
DIM = 33
#: Scalars, and the rows by which shards of uneven sizes may be padded; less than any unit, even the root's own.
CRUMBS = 4 * DIM * 16


@contract("MEMORY-8")
@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(one, marks=UNITS) for one in ("modules", "dropped-unshards", "state-dicts", "optimizer-states")),
        *(pytest.param(one, marks=WRAPPERS) for one in ("wrappers", "wrapped-state-dicts", "wrapped-optimizer-states")),
    ],
)
def test_memory_after_calls(rank: Rank, family: str) -> None:
    """A call between two steps leaves no more bytes than there were before it, and returns keep nothing alive."""
    run = run_by_units(rank, models.Tower(dim=DIM), optimizer=optim.sgd(), pictures=False)
    for step in range(2):
        run.step([(rank.batch(step, (2, DIM)),)], loss=models.mean_square)
    nothing = Held({}, {}, {}, torch.empty(0), torch.empty(0))
    scene = Scene(rank, run, STEPPED, 2, True, nothing, nothing)
    grown = dict[str, tuple[int, int]]()
    for call in FAMILIES[family]:
        if call.applies(scene):
            before = memory.held_bytes(rank.device)
            call.make(scene)
            # A thread of the communication library may hold the last collective's tensors for a moment.
            after = memory.settled_bytes(rank.device, limit=before + CRUMBS)
            if after > before + CRUMBS:
                grown[call.name] = (before, after)
    everyone = [one for one in rank.exchange(grown) if one]
    assert not everyone, f"bytes of tensors before and after calls that leave some: {everyone[0]}"


@contract("MEMORY-2")
@needs("precision.param_dtype")
def test_memory_after_steps_in_lower_precision(rank: Rank) -> None:
    """After steps and an evaluation in lower precision a rank without gradients holds no parameters in it."""
    precision = Precision(param_dtype=torch.bfloat16)
    model = models.Tower(dim=DIM)
    low = sum(parameter.numel() for parameter in model.parameters()) * 2 // rank.world_size
    run = run_by_units(rank, model, optimizer=optim.sgd(momentum=0.0), pictures=False, precision=precision)
    before = memory.held_bytes(rank.device)
    for step in range(2):
        run.step([(rank.batch(step, (2, DIM)),)], loss=models.mean_square)
        run.adapter.zero_grad(set_to_none=True)
    run.evaluate((rank.batch(0, (2, DIM)),))  # after which gradients that are None are freed for certain
    most = before + low // 2
    after = memory.settled_bytes(rank.device, limit=most)
    assert after <= most, f"a rank held {before} bytes before and {after} after; its part in lower precision is {low}"


@contract("MEMORY-4")
@pytest.mark.parametrize(
    ("kernels", "rate", "options"),
    [
        *(pytest.param(one, float, {}, id=one) for one in ("foreach", "fused", "for-loop")),
        *(pytest.param(one, torch.tensor, {}, id=f"{one}-tensor") for one in ("fused", "for-loop")),
        pytest.param("foreach", torch.tensor, {"capturable": True}, id="capturable", marks=needs(Hardware.ACCELERATOR)),
        pytest.param("foreach", float, {"amsgrad": True, "maximize": True}, id="amsgrad"),
    ],
)
def test_objects_after_steps_of_adam(
    rank: Rank, kernels: optim.Kernels, rate: Callable[[float], Any], options: dict[str, Any]
) -> None:
    """Steps of AdamW by any kernels, clipped and each with a learning rate, hold no more than the first few.

    The rate is a number or a tensor.

    Objects and bytes of tensors are counted, and the entries of all lists, dicts and sets.
    """
    clip = Clip(1e-3) if Capability.CLIP_BY_CALL in rank.implementation.capabilities() else None
    model = models.Tower(dim=9)
    # Without a run, which notes its own steps.
    adapter = sharded(
        rank,
        model.to(rank.device),
        optimizer=functools.partial(optim.adamw(kernels=kernels), **options),
        units=model.units(),
        clip=clip,
    )
    optimizer, counts = adapter.optimizer, []
    assert optimizer is not None
    for step in range(SETTLED + STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(1e-3 / (1 + step))
        if step % 3 == 1:
            with torch.no_grad():
                adapter.forward(rank.batch(0, (2, 9)))
        adapter.backward(models.mean_square(adapter.forward(rank.batch(step, (1 + step % 4, 9)))))
        if clip is not None:
            adapter.clip()
        adapter.step()
        adapter.zero_grad(set_to_none=True)
        if step in (SETTLED - 1, SETTLED + STEPS - 1):
            _counted(rank.device)  # which makes objects for the storages that it reads
            counts.append(_counted(rank.device))
    first, last = counts
    grown = {name: (first[name], last[name]) for name in first if last[name] > first[name] + ALLOWED.get(name, 0)}
    assert not grown, f"what is held after step {SETTLED} and {STEPS} steps later: {grown}"


#: After so many steps all that lives as long as the model has been made; and how many follow.
SETTLED, STEPS = 6, 40
#: What comes and goes with the interpreter. One thing a step would be as many as there are steps.
ALLOWED = {"objects": 20, "entries of containers": 20, "bytes of tensors": 4 * 9 * 36}


def _counted(device: torch.device) -> dict[str, int]:
    memory.collect_garbage()
    found = gc.get_objects()
    entries = sum(len(one) for one in found if type(one) in (list, dict, set))
    return {"objects": len(found), "bytes of tensors": memory.tensor_bytes(device), "entries of containers": entries}
