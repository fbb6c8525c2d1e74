"""Chapter COLLECTIVES: how many, how large, in which order, among which ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.adapters.base import Accumulation
from shardproof.harness.findings.finding import step_label
from shardproof.harness.models.ties import RepeatedTower
from shardproof.harness.parity import Pair, Rank
from shardproof.harness.plugin.axes import RESHARD_ROOT

DEPTH = 3
UNITS = DEPTH + 1  # the root has parameters of its own


@contract("COLLECTIVES-1", "COLLECTIVES-2", "COLLECTIVES-5", "COLLECTIVES-6")
@world(2, 4)
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_counts_and_bytes(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Each unit is gathered once in forward, again in backward if it was freed, and reduced once."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    kept: dict[bool | int | None, int] = {None: DEPTH, False: 0}
    in_backward = kept.get(reshard_after_forward, UNITS)
    # An int that is no bool: backward gathers from the ranks among which forward has left the parameters.
    size = rank.world_size if type(reshard_after_forward) is not int else reshard_after_forward
    first = rank.index - rank.index % size
    groups = {("backward", "all_gather"): tuple(range(first, first + size))}
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        pair.check_counts("forward", all_gather=UNITS)
        pair.check_counts("backward", all_gather=in_backward, reduce_scatter=UNITS)
        pair.check_counts("step")
        pair.check_bytes()
        for item in pair.last_trace():
            expected = groups.get((item.phase, item.kind), tuple(range(rank.world_size)))
            assert item.group == expected, f"{item}: its ranks should be {expected}"
            assert item.dtype == "float32", f"{item}: its dtype should be that of the parameters, float32"


@contract("COLLECTIVES-3")
@world(1)
@needs(Capability.SINGLE_RANK)
def test_no_collectives_alone(rank: Rank) -> None:
    """A world of one rank issues no collective."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units())
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
    for phase in ("forward", "backward", "step"):
        pair.check_counts(phase)


@contract("COLLECTIVES-4")
@world(2)
@needs(Capability.COUNTED_UNITS, Capability.GATHER_ORDER, Capability.ROOT_RESHARD)
def test_order(rank: Rank) -> None:
    """Forward gathers each unit when it runs; backward gathers one unit ahead of the one that it reduces."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=True)
    pair.step(rank.batch(0, (4, 9)))
    pair.check()
    rank.expect(
        pair.sharded.trace.render(),
        """\
forward   all_gather      float32      400 B  ranks 0-1  (root)
forward   all_gather      float32     1480 B  ranks 0-1  layers.0
forward   all_gather      float32     2240 B  ranks 0-1  layers.1
forward   all_gather      float32     2920 B  ranks 0-1  layers.2
backward  all_gather      float32      400 B  ranks 0-1  (root)
backward  all_gather      float32     2920 B  ranks 0-1  layers.2
backward  all_gather      float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32     2920 B  ranks 0-1  layers.2
backward  all_gather      float32     1480 B  ranks 0-1  layers.0
backward  reduce_scatter  float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32      400 B  ranks 0-1  (root)
backward  reduce_scatter  float32     1480 B  ranks 0-1  layers.0
""",
    )


@contract("COLLECTIVES-4")
@world(2)
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD, Capability.MULTIPLE_FORWARD)
@pytest.mark.parametrize("model", [models.Tower, RepeatedTower], ids=["once", "twice"])
def test_backward_gathers_one_unit_ahead(rank: Rank, model: Callable[[int], models.Tower]) -> None:
    """While a layer computes its gradients, the one that follows is gathered, and no other: by the order of forward.

    Layers that run twice follow each other twice. They may be freed after each of their backwards or after the last.
    """
    tower = model(9)
    pair = rank.pair(tower, units=tower.units(), reshard_after_forward=True)
    ran: list[str] = []
    found: list[tuple[str, list[str]]] = []

    def gathered() -> list[str]:
        items = [item for item in pair.last_trace() if (item.phase, item.kind) == ("backward", "all_gather")]
        return [item.unit for item in items if item.unit.startswith("layers.")]

    def watch(name: str) -> Callable[[Any, Any, torch.Tensor], None]:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            ran.append(name)
            output.register_hook(lambda gradient: found.append((name, gathered())))

        return hook

    for index in range(DEPTH):
        pair.adapter.submodule(f"layers.{index}.in_proj").register_forward_hook(watch(f"layers.{index}"))
    for step in range(2):
        ran.clear()
        found.clear()
        pair.step(rank.batch(step, (4, 9)))
        order = ran[::-1]
        # Freed after the last of its backwards, a layer is gathered once.
        needed = order if len(gathered()) == len(order) else list(dict.fromkeys(order))
        for number, (name, units) in enumerate(found):
            assert name == order[number], f"layers compute their gradients in the order {[name for name, _ in found]}"
            assert units == needed[: number + 2], (
                f"while backward {number} of {len(order)}, of {name}, computes in {step_label(step)}, gathered are "
                f"{units} instead of {needed[: number + 2]}"
            )
        assert len(found) == len(order)
        pair.check()


@contract("COLLECTIVES-6")
@world(4)
@needs(Capability.TENSOR_PARALLEL)  # beside which a data-parallel mesh is a part of the world
@pytest.mark.parametrize("name", ["columns", "rows"])
def test_only_ranks_of_the_mesh_take_part(rank: Rank, name: str) -> None:
    """On a mesh of half the ranks nothing is exchanged with the other half, which trains on other data."""
    mesh = rank.mesh((2, 2), ("columns", "rows"))[name]
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), mesh=mesh)
    mine = tuple(mesh.mesh.tolist())
    for step in range(2):
        # A batch of this rank's own: the two halves have nothing in common.
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        for item in pair.last_trace():
            assert item.group == mine, f"{item}: the data-parallel ranks are {mine}"


@contract("COLLECTIVES-7")
@world(2)
@needs(Capability.COUNTED_UNITS, Capability.GROUPED_UNIT, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
def test_unit_of_several_modules(rank: Rank) -> None:
    """Several modules of one unit are gathered by one collective and reduced by one."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=[["layers.0", "layers.1"], ["layers.2"]], reshard_after_forward=True)
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        pair.check_counts("forward", all_gather=3)
        pair.check_counts("backward", all_gather=3, reduce_scatter=3)
        pair.check_bytes()


@contract("COLLECTIVES-7")
@world(2)
@needs(Capability.COUNTED_UNITS, Capability.GROUPED_UNIT, Capability.UNUSED_MODULE)
@needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("used", [0, 2])
def test_unit_with_modules_that_do_not_run(rank: Rank, used: int) -> None:
    """A unit of which only the first or the last module runs is gathered once and reduced once too."""
    model = models.Branches(dim=9, branches=3)
    grouped = [["branches.0", "branches.1", "branches.2"]]
    pair = rank.pair(model, units=grouped, baseline="replicated", find_unused=True, reshard_after_forward=True)
    for step in range(2):
        pair.step((rank.batch(step, (4, 9)), used))
        pair.check()
        pair.check_counts("forward", all_gather=2)
        pair.check_counts("backward", all_gather=2, reduce_scatter=2)


@contract("COLLECTIVES-8")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_bytes_of_a_step(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A step moves each sharded parameter at most twice, and each gradient once."""
    model = models.Tower(dim=17, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    gathers = 1 if reshard_after_forward is False else 2
    if "parameters" not in rank.implementation.traits.shards:
        gathers = 1  # of the parameters or gradients that an all-reduce, or the step, distributes
    full, padded = (4 * sum(sizes) for sizes in zip(*_sizes(pair), strict=True))
    for step in range(2):
        pair.step(rank.batch(step, (4, 17)))
        pair.check()
        trace = pair.last_trace()
        moved = sum(item.nbytes * (2 if item.kind == "all_reduce" else 1) for item in trace)
        # A sixteenth of the parameters is allowed for flags and norms.
        limit = (gathers + 1) * padded + full // 16
        assert full < moved <= limit, (
            f"step {step} moved {moved} bytes; with {full} bytes of parameters at most {limit} are needed:\n"
            f"{trace.render()}"
        )


@contract("COLLECTIVES-10")
@world(4)
@needs(Capability.COUNTED_UNITS, Capability.HYBRID, Capability.DEFERRED_ALL_REDUCE)
def test_deferred_all_reduce_is_taken_back(rank: Rank) -> None:
    """Where only the all-reduce was deferred, the setting that all gradients are reduced takes that back."""
    model = models.Tower(dim=9, depth=DEPTH)
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    pair = rank.pair(model, units=model.units(), mesh=mesh, microbatches=2, accumulation=Accumulation())
    adapter, context = pair.adapter, pair.adapter.microbatch

    def microbatch(*, is_last: bool) -> contextlib.AbstractContextManager[None]:
        how = Accumulation(skips="reduction" if is_last else "all-reduce")
        adapter.config = dataclasses.replace(adapter.config, accumulation=how)
        return context(is_last=is_last)

    rank.monkeypatch.setattr(adapter, "microbatch", microbatch)
    for step in range(3):
        pair.step([rank.batch(step, (4, 9), microbatch=number) for number in range(2)], set_to_none=step % 2 == 0)
        pair.check()
        pair.check_counts("backward", all_gather=2 * DEPTH, reduce_scatter=2 * UNITS, all_reduce=UNITS)


def _sizes(pair: Pair) -> Sequence[tuple[int, int]]:
    """The elements of each unit, without padding and with all padding that is declared."""
    return [(unit.numel, unit.padded_numel) for unit in pair.units]
