"""Chapter COLLECTIVES: how many, how large, in which order, among which ranks."""

import contextlib
import copy
import dataclasses
import string
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.suites.apis import Own
from shardproof.testing import Capability, Pair, Rank, contract, models, needs, world
from shardproof.testing.axes import RESHARD, RESHARD_ROOT, subjects
from shardproof.testing.compare import step_label
from shardproof.testing.make import Accumulation, Adapter, Clip, Settings, cut_over, pair_by_units, tower
from shardproof.testing.measure import Collective, Trace, first_difference
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import batches, checked_steps, optim, parallel, shapes, ties, train_and_check

pytestmark = world(2)


class Fan(nn.Module):
    """The sum of ``arms``, MLPs of different sizes on one input, among which backward has no order, and ``out``.

    Input and output: (batch, dim).

    Args:
        dim: the width.
        names: of the arms, in the order of their sizes and calls.
    """

    def __init__(self, dim: int, names: Sequence[str]) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.arms = nn.ModuleDict({name: models.MLP(dim, multiplier=1 + index) for index, name in enumerate(names)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.stack([arm(x) for arm in self.arms.values()]).sum(0))
        return out


def _prefetch(**ahead: dict[str, list[str]]) -> Callable[[Adapter], None]:
    return lambda adapter: adapter.prefetch(**({"forward": {}, "backward": {}} | ahead))


def _memory_of_another(adapter: Adapter, **own: Any) -> None:
    adapter.change(Settings(**own), unit="layers.1")
    adapter.change(Settings(allocate_memory_from_process_group_for_comm=True), unit="layers.1")


def _set(**settings: Any) -> Callable[[Adapter], None]:
    return lambda adapter: adapter.change(Settings(**settings))


NO_UNIT = ("FSDPModule",)  # an attribute error of a layer would name its class
#: Settings that are invalid, each with words one of which is in the error.
WRONG_SETTINGS: dict[str, tuple[Callable[[Adapter], object], tuple[str, ...]]] = {
    "a-size-after-forward": (_set(reshard_after_forward=2), ("bool",)),
    "no-inputs": (_set(reduce_scatter_max_input_buffers=0), ("max_input_buffers",)),
    "half-an-input": (_set(reduce_scatter_max_input_buffers=1.5), ("max_input_buffers",)),
    "a-choice-of-inputs": (_set(reduce_scatter_max_input_buffers=True), ("max_input_buffers",)),
    "a-layer-that-is-no-unit": (_prefetch(forward={"layers.0": ["layers.1.in_proj"]}), NO_UNIT),
    "a-layer-that-is-no-unit-in-backward": (_prefetch(backward={"layers.1": ["layers.0.in_proj"]}), NO_UNIT),
    "a-method-that-is-not-there": (lambda adapter: adapter.register_forward_method("layers.0", "absent"), ("absent",)),
    "memory-of-another": (lambda adapter: _memory_of_another(adapter, custom_reduce_scatter=Own()), ("custom",)),
    "memory-of-another-gather": (lambda adapter: _memory_of_another(adapter, custom_all_gather=Own()), ("custom",)),
    "a-deep-copy": (lambda adapter: copy.deepcopy(adapter.module), ("deepcopy",)),
}


def _defer(adapter: Adapter) -> None:
    with adapter.microbatch(is_last=False):
        pass


#: Calls that are valid on the root and refused on another unit.
OF_THE_ROOT: dict[str, Callable[[Adapter], Any]] = {
    "deferring": _defer,
    "clipping": lambda adapter: adapter.clip(),
    "recovering": lambda adapter: adapter.recover(),
}


DEPTH = 3
UNITS = DEPTH + 1  # the root has parameters of its own


@contract("COLLECTIVES-1", "COLLECTIVES-2", "COLLECTIVES-5", "COLLECTIVES-6")
@world(2, 4)
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_counts_and_bytes(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Each unit is gathered once in forward, again in backward if it was freed, and reduced once."""
    pair = tower(rank, reshard_after_forward=reshard_after_forward)
    kept: dict[bool | int | None, int] = {None: DEPTH, False: 0}
    in_backward = kept.get(reshard_after_forward, UNITS)
    # An int that is not a bool: backward gathers from the ranks of the group to which forward has resharded.
    size = rank.world_size if type(reshard_after_forward) is not int else reshard_after_forward
    first = rank.index - rank.index % size
    groups = {("backward", "all_gather"): tuple(range(first, first + size))}
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
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
def test_no_collectives_on_one_rank(rank: Rank) -> None:
    """A world of size 1 issues no collective."""
    pair = tower(rank)
    train_and_check(pair, batches(rank, 2, (4, 9)))
    for phase in ("forward", "backward", "step"):
        pair.check_counts(phase)


@contract("COLLECTIVES-4")
@needs(Capability.COUNTED_UNITS, Capability.ALL_GATHER_ORDER, Capability.ROOT_RESHARD)
def test_order(rank: Rank) -> None:
    """Forward gathers each unit when it runs; backward gathers one unit ahead of the one that it reduces."""
    pair = tower(rank, reshard_after_forward=True)
    train_and_check(pair, batches(rank, 1, (4, 9)))
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
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD, Capability.MULTIPLE_FORWARD)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(models.Tower, id="once"), pytest.param(ties.RepeatedTower, id="twice"),
        pytest.param(ties.ReturningTower, id="again-with-two-outputs", marks=needs(Capability.ALL_GATHER_ORDER)),
    ],
)  # fmt: skip
def test_backward_gathers_one_unit_ahead(rank: Rank, model: Callable[[int], models.Tower]) -> None:
    """While a layer computes its gradients, only the next one in backward is gathered, by the order of forward.

    Layers that run twice occur twice in that order. They may be freed after each of their backwards or after the last.
    """
    pair = pair_by_units(rank, model(9), reshard_after_forward=True)
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
        # A layer that is freed after the last of its backwards is gathered once.
        gathers_again = len(gathered()) == len(order)
        for number, (name, units) in enumerate(found):
            assert name == order[number], f"layers compute their gradients in the order {[name for name, _ in found]}"
            needed = order[: number + 2] if gathers_again else [*dict.fromkeys(order[: number + 2])]
            assert units == needed, (
                f"while backward {number} of {len(order)}, of {name}, computes in {step_label(step)}, gathered are "
                f"{units} instead of {needed}"
            )
        assert len(found) == len(order)
        pair.check()


@contract("COLLECTIVES-4")
@needs(Capability.COUNTED_UNITS, Capability.CAST_AFTER_INIT)
def test_order_after_a_cast(rank: Rank) -> None:
    """A model that is cast after an evaluation gathers and reduces in the order of one that was cast before it."""
    model, batch = models.Tower(dim=9), rank.batch(0, (4, 9))

    def order(*, evaluates: bool) -> list[str]:
        run = rank.run(models.copy_of(model), units=model.units())
        if evaluates:
            run.evaluate((batch,))
        run.adapter.module.double()
        before = len(run.trace)
        run.forward_backward((batch.double(),), loss=models.mean_square)
        return _order(run.trace[before:])

    expected, found = order(evaluates=False), order(evaluates=True)
    assert found == expected, f"without an evaluation: {expected}; after one: {found}"


@contract("COLLECTIVES-4")
@needs(Capability.COUNTED_UNITS)
def test_steps_in_evaluation_mode(rank: Rank) -> None:
    """A training step of a model in evaluation mode has the collectives of one in training mode."""
    pair = tower(rank)
    orders = []
    for step in range(4):
        pair.adapter.module.train(step % 2 == 0)
        pair.checked_step(rank.batch(step, (4, 9)))
        orders.append(_order(pair.last_trace()))
        assert orders[-1] == orders[0], f"in training mode: {orders[0]}; {step_label(step)}: {orders[-1]}"


@contract("COLLECTIVES-4")
@needs(Capability.COUNTED_UNITS, Capability.CONTAINER_OUTPUT)
@subjects("container", ["dict", pytest.param("dataclass", marks=needs(Capability.DATACLASS_OUTPUT))])
def test_order_with_containers(rank: Rank, container: models.Container) -> None:
    """Units reduce as soon as their gradients are complete, also where a container brings their input."""

    def order(container: models.Container) -> list[str]:
        run = rank.run(models.packed_stack(dim=9, container=container), units=[["1"], ["2"], ["3"]])
        run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
        return _order(run.trace)

    expected, found = order("tuple"), order(container)
    assert found == expected, f"with a tuple: {expected}; with a {container}: {found}"


def _order(trace: Sequence[Collective]) -> list[str]:
    return [f"{item.phase}: {item.kind} of {item.unit}" for item in trace]


@contract("COLLECTIVES-1", "COLLECTIVES-4")
@needs(Capability.COUNTED_UNITS, Capability.UNUSED_OUTPUT)
def test_steps_with_an_unused_output(rank: Rank) -> None:
    """Where the loss ignores the last unit's output, each step has the collectives of the first."""
    pair = rank.pair(
        models.TwoHeads(dim=9), units=[["head0"], ["head1"]], baseline="replicated", find_unused_parameters=True
    )
    orders = []
    for step in checked_steps(pair, batches(rank, 3, (4, 9)), loss=models.first_head):
        orders.append(_order(pair.last_trace()))
        assert orders[-1] == orders[0], f"the first step: {orders[0]}; {step_label(step)}: {orders[-1]}"


@contract("COLLECTIVES-6")
@world(4)
@needs(Capability.TENSOR_PARALLEL)  # with it, a data-parallel mesh is a sub-mesh of the world
@pytest.mark.parametrize("name", ["columns", "rows"])
def test_only_ranks_of_the_mesh_take_part(rank: Rank, name: str) -> None:
    """On a mesh of half the ranks nothing is exchanged with the other half, which trains on other data."""
    mesh = rank.mesh((2, 2), ("columns", "rows"))[name]
    pair = tower(rank, mesh=mesh)
    mine = tuple(mesh.mesh.tolist())
    # Each rank has a batch of its own: the two halves share nothing.
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        for item in pair.last_trace():
            assert item.group == mine, f"{item}: the data-parallel ranks are {mine}"


@contract("COLLECTIVES-5", "COLLECTIVES-6")
@world(8)
@needs(Capability.TENSOR_PARALLEL, Capability.COUNTED_UNITS, Capability.RESHARD_A_PART, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=["in-a-row", "every-other"])
def test_resharded_within_half_the_ranks(rank: Rank, shape: tuple[int, int]) -> None:
    """Of a mesh of half the ranks, resharded to groups of two, backward gathers within two neighbours on that mesh."""
    mesh = rank.mesh(shape, ("halves", "dp") if shape[0] == 2 else ("dp", "halves"))["dp"]
    pair = tower(rank, mesh=mesh, reshard_after_forward=2)
    mine, first = tuple(mesh.mesh.tolist()), mesh.get_local_rank() // 2 * 2
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        for item in pair.last_trace():
            again = (item.phase, item.kind) == ("backward", "all_gather")
            expected = mine[first : first + 2] if again else mine
            assert item.group == expected, f"{item}: its ranks should be {expected}"


@contract("COLLECTIVES-7")
@needs(Capability.COUNTED_UNITS, Capability.GROUPED_UNIT, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
def test_unit_of_several_modules(rank: Rank) -> None:
    """Several modules of one unit are gathered by one collective and reduced by one."""
    model = models.Tower(dim=9)
    pair = rank.pair(model, units=[["layers.0", "layers.1"], ["layers.2"]], reshard_after_forward=True)
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        pair.check_counts("forward", all_gather=3)
        pair.check_counts("backward", all_gather=3, reduce_scatter=3)
        pair.check_bytes()


@contract("COLLECTIVES-7")
@needs(Capability.COUNTED_UNITS, Capability.GROUPED_UNIT, Capability.UNUSED_MODULE)
@needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("used", [0, 2])
def test_unit_with_modules_that_do_not_run(rank: Rank, used: int) -> None:
    """A unit of which only the first or the last module runs is gathered once and reduced once too."""
    pair = _branches(rank, 3)
    for _ in checked_steps(pair, ((batch, used) for batch in batches(rank, 2, (4, 9)))):
        pair.check_counts("forward", all_gather=2)
        pair.check_counts("backward", all_gather=2, reduce_scatter=2)


def _branches(rank: Rank, number: int) -> Pair:
    """A pair with one unit of so many modules, of which a forward need not use all."""
    options: Any = {"baseline": "replicated", "find_unused_parameters": True, "reshard_after_forward": True}
    grouped = [f"branches.{index}" for index in range(number)]
    return rank.pair(models.Branches(dim=9, branches=number), units=[grouped], **options)


@contract("COLLECTIVES-7")
@needs(Capability.COUNTED_UNITS, Capability.GROUPED_UNIT, Capability.UNUSED_MODULE)
@needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
def test_modules_of_a_unit_in_another_order(rank: Rank) -> None:
    """After a forward in which one module of a unit did not run, the next gathers the unit once, in any order."""
    pair = _branches(rank, 2)
    for step, order in enumerate([(1, 0), (0, 1)]):
        pair.evaluate((rank.batch(step, (4, 9), microbatch=1), order[1]))
        pair.checked_step((rank.batch(step, (4, 9)), order))
        pair.check_counts("forward", all_gather=2)
        pair.check_counts("backward", all_gather=2, reduce_scatter=2)


@contract("COLLECTIVES-7")
@needs(Capability.GROUPED_UNIT, Capability.UNUSED_OUTPUT)
@subjects("used", [0, 1], ids=["of-the-first", "of-the-last"])
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_output_of_one_of_several_modules(rank: Rank, used: int, reshard_after_forward: bool | None) -> None:
    """The loss may use the output of one module of a unit alone, of the first as well as of the last."""
    # There is a layer before it: backward through an input that requires no gradient needs no parameters.
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), models.TwoHeads(dim=9))
    options: Any = {"units": [["1.head0", "1.head1"]], "reshard_after_forward": reshard_after_forward}
    pair = rank.pair(model, baseline="replicated", find_unused_parameters=True, **options)
    train_and_check(pair, batches(rank, 2, (4, 9)), loss=lambda outputs: models.mean_square(outputs[used]))


@contract("COLLECTIVES-4")
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_evaluations_add_no_gather_to_a_step(rank: Rank, reshard_after_forward: bool | None) -> None:
    """An evaluation before the step adds no gather to its backward, where the root has no parameters of its own."""
    model = nn.Sequential(*(models.MLP(9) for _ in range(DEPTH)))
    units = [[name] for name, _ in model.named_children()]
    pair = rank.pair(model, units=units, reshard_after_forward=reshard_after_forward)
    for step in range(3):
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1))
        pair.checked_step(rank.batch(step, (4, 9)))
        in_backward = 0 if reshard_after_forward is False else DEPTH
        pair.check_counts("backward", all_gather=in_backward, reduce_scatter=DEPTH)


@contract("COLLECTIVES-4")
@needs(Capability.COUNTED_UNITS, Capability.MULTIPLE_FORWARD, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("kind", [models.Tower, ties.RepeatedTower], ids=["once", "twice"])
def test_evaluation_between_forward_and_backward(rank: Rank, kind: type[models.Tower]) -> None:
    """An evaluation between forward and backward changes neither what backward gathers nor when."""
    model, batches = kind(dim=9, depth=DEPTH), [rank.batch(number, (4, 9)) for number in range(2)]
    traces: list[str] = []
    for evaluates in (False, True):
        run = rank.run(models.copy_of(model), units=model.units(), reshard_after_forward=True)
        loss = models.mean_square(run.adapter.forward(batches[0]))
        if evaluates:
            run.evaluate((batches[1],))
        run.trace.clear()
        with run.recorder.during("backward"):
            run.adapter.backward(loss)
        traces.append(run.trace.render())
    assert traces[1] == traces[0], f"backward with an evaluation before it:\n{traces[1]}\nwithout one:\n{traces[0]}"


@contract("COLLECTIVES-8")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_bytes_of_a_step(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A step moves each sharded parameter at most twice, and each gradient once, alone or with as many as fit."""
    pair = tower(rank, dim=17, reshard_after_forward=reshard_after_forward)
    gathers = 1 if reshard_after_forward is False else 2
    if "parameters" not in rank.implementation.traits.shards:
        gathers = 1  # of the parameters or gradients that an all-reduce, or the step, distributes
    full, padded = (4 * sum(sizes) for sizes in zip(*_sizes(pair), strict=True))
    bytes_of = [4 * parameter.numel() for parameter in pair.oracle.model.parameters()]
    largest, parameters = max(bytes_of), len(bytes_of)
    for step in checked_steps(pair, batches(rank, 2, (4, 17))):
        trace = pair.last_trace()
        moved = sum(item.nbytes * (2 if item.kind == "all_reduce" else 1) for item in trace)
        # A sixteenth of the parameters is allowed for flags and norms.
        limit = (gathers + 1) * padded + full // 16
        assert full < moved <= limit, (
            f"step {step} moved {moved} bytes; with {full} bytes of parameters at most {limit} are needed:\n"
            f"{trace.render()}"
        )
        reduced = sum("reduce" in item.kind and item.phase == "backward" for item in trace)
        most = -(-2 * full // largest)  # two reductions in turn have more than the largest gradient
        assert reduced <= most or reduced == parameters, f"{reduced} reductions of {parameters} gradients, not {most}"


@contract("COLLECTIVES-9")
@world(2, 4)
@pytest.mark.parametrize("number", range(3))
def test_ranks_issue_one_sequence(rank: Rank, number: int) -> None:
    """All ranks issue the same collectives in the same order, whatever the names and addresses of modules are.

    Sets of names or addresses would iterate in another order on each rank, and backward may take branches in any order.
    """
    random = Random(1000 * number + rank.index)
    kept = [bytes(random.randrange(64, 4096)) for _ in range(200)]
    names = ["".join(random.choices(string.ascii_lowercase, k=8)) for _ in range(6)]
    model = Fan(dim=9, names=names)
    mesh = rank.mesh((2, 2), ("replicate", "shard")) if rank.world_size == 4 and _has(rank, "HYBRID") else None
    options: Any = {"optimizer": optim.sgd(), "clip": Clip(0.01) if _has(rank, "CLIPPING") else None}
    options |= {"units": [[f"arms.{name}"] for name in names], "mesh": mesh, "microbatches": 2}
    run = rank.run(model, pictures=False, **options)
    for step in range(2):
        kept.append(bytes(random.randrange(64, 4096)))
        run.step([(rank.batch(step, (2, 9), microbatch=index),) for index in range(2)], loss=models.mean_square)
    rank.expect_different_collectives()  # they differ by the names of units, and by nothing else
    mine = Trace(dataclasses.replace(item, unit="") for item in run.trace)
    difference = first_difference(rank.exchange(mine))
    if difference is not None:
        raise AssertionError(f"collectives differ between ranks: {difference.text}")
    # Implementations that reduce several units together, in buckets, issue fewer.
    least = 2 * len(names) if _has(rank, "COUNTED_UNITS") else 1
    assert len(run.trace) >= least, f"there are {len(run.trace)} collectives of {len(names)} units"


def _has(rank: Rank, name: str) -> bool:
    return Capability[name] in rank.implementation.capabilities()


@contract("COLLECTIVES-10")
@world(4)
@needs(Capability.COUNTED_UNITS, Capability.HYBRID, Capability.DEFERRED_REDUCTION, "accumulation.skips")
def test_clearing_the_deferral_of_the_all_reduce(rank: Rank) -> None:
    """After only the all-reduce was deferred, setting all gradients to be reduced restores the all-reduce too."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    pair = tower(rank, mesh=mesh, microbatches=2, accumulation=Accumulation())
    adapter, context = pair.adapter, pair.adapter.microbatch

    def microbatch(*, is_last: bool) -> contextlib.AbstractContextManager[None]:
        how = Accumulation(skips="reduction" if is_last else "all-reduce")
        adapter.config = dataclasses.replace(adapter.config, accumulation=how)
        return context(is_last=is_last)

    rank.monkeypatch.setattr(adapter, "microbatch", microbatch)
    for _ in checked_steps(pair, batches(rank, 3, (4, 9), microbatches=2), set_to_none="even"):
        pair.check_counts("backward", all_gather=2 * DEPTH, reduce_scatter=2 * UNITS, all_reduce=UNITS)


@contract("COLLECTIVES-10")
@needs(Capability.UNIT_SETTINGS, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
@subjects(("unit", "recurse"), [("layers.1", False), ("", False), ("", True)], ids=["a-layer", "the-root", "all-units"])
@pytest.mark.parametrize("choices", [(None, False, True, False), (True, False)], ids=["between-steps", "at-once"])
def test_resharding_is_changed(rank: Rank, choices: tuple[bool | None, ...], unit: str, recurse: bool) -> None:
    """Whether a unit, or all of them, frees its parameters after forward can change before any step, and back."""
    pair = tower(rank)
    frees = {"(root)": False} | {f"layers.{index}": True for index in range(DEPTH)}
    for step, choice in enumerate(choices):
        if choice is not None:
            pair.adapter.change(Settings(reshard_after_forward=choice), unit=unit, recurse=recurse)
            frees |= dict.fromkeys(frees if recurse else [unit or "(root)"], choice)
        pair.checked_step(rank.batch(step, (4, 9)))
        pair.check_counts("forward", all_gather=UNITS)
        assert_gathered_in_backward(pair, step, [name for name, is_freed in frees.items() if is_freed])


@contract("COLLECTIVES-10")
@needs(Capability.UNIT_SETTINGS, Capability.COUNTED_UNITS, Capability.ALL_GATHER_ORDER)
@subjects("unit", ["0", ""], ids=["a-layer", "the-root"])
def test_backward_gathers_a_unit_or_not(rank: Rank, unit: str) -> None:
    """A unit whose backward needs no parameters need not be gathered in backward, as long as that is set.

    Set on the root, whose own unit stays gathered in any case, it changes nothing for the units inside.
    """
    model = nn.Sequential(nn.Embedding(11, 9), nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 7))
    pair = rank.pair(model, units=[["0"], ["1"]])
    for step, gathers in enumerate([None, False, True, False]):
        if gathers is not None:
            pair.adapter.change(Settings(unshard_in_backward=gathers), unit=unit)
        pair.checked_step(rank.tokens(step, (4, 3), vocabulary=11))
        pair.check_counts("forward", all_gather=3)
        assert_gathered_in_backward(pair, step, ["1"] if gathers is False and unit else ["0", "1"])


@contract("COLLECTIVES-10")
@world(4)
@needs(
    Capability.FSDP2_API, Capability.UNIT_SETTINGS, Capability.RESHARD_TO_SIZE, "accumulation.reshard_after_backward"
)
def test_backward_neither_gathers_nor_frees_a_unit(rank: Rank) -> None:
    """A unit in shards of groups of two that backward neither gathers nor frees is reduced over all ranks."""
    model = nn.Sequential(nn.Embedding(11, 9), nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 7))
    pair = rank.pair(model, units=[["0"], ["1"]], reshard_after_forward=2)
    unit: Any = pair.adapter.submodule("0")
    unit.set_unshard_in_backward(False)
    unit.set_reshard_after_backward(False)
    pair.checked_step(rank.tokens(0, (4, 3), vocabulary=11))


@contract("COLLECTIVES-10")
@needs(Capability.UNIT_SETTINGS, Capability.RANKS_DIFFER, Capability.GROUPED_UNIT)
@subjects(("unit", "recurse"), [("used", False), ("", False), ("", True)], ids=["the-unit", "the-root", "all-units"])
def test_zeros_are_reduced_or_not(rank: Rank, unit: str, recurse: bool) -> None:
    """An unused parameter is reduced with zeros while its unit has that setting; otherwise it is left out."""
    model = shapes.SkippedMember(dim=9)
    model.skipped.bias.requires_grad_(False)  # has no gradient in any case
    run = rank.run(model, units=[["used", "skipped"]])
    sizes: list[int] = []
    for step, zeros in enumerate([False, True, False]):
        run.adapter.change(Settings(reduce_scatter_unused_params=zeros), unit=unit, recurse=recurse)
        run.trace.clear()
        run.forward_backward((rank.batch(step, (2, 9)),), loss=models.mean_square)
        sizes.append(sum(item.nbytes for item in run.trace if item.kind == "reduce_scatter"))
        number = run.trace.counts("backward")["reduce_scatter"]
        assert number == 2, f"{step_label(step)} has {number} reductions of two units"
        has_zeros = zeros and (unit == "used" or recurse)
        gradients = {name for name, piece in run.adapter.gradients().items() if piece is not None}
        found = sorted(name for name in gradients if name.startswith("skipped."))
        expected = ["skipped.weight"] * has_zeros
        assert found == expected, f"in {step_label(step)} unused parameters with gradients are {found}, not {expected}"
        assert (sizes[step] > sizes[0]) == has_zeros, f"bytes of the reductions in three steps: {sizes}"
        run.adapter.zero_grad(set_to_none=True)


@contract("COLLECTIVES-10")
@world(4)
@needs(Capability.UNIT_SETTINGS, Capability.RANKS_DIFFER, Capability.TENSOR_PARALLEL)
def test_zeros_with_tensor_parallelism(rank: Rank) -> None:
    """Zeros for an unused tensor-parallel parameter have the shape of this rank's part."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    options = cut_over(mesh, parallel.parallelize_mlps)
    pair = rank.pair(
        parallel.Skipping(5), baseline="replicated", ranks_differ=True, find_unused_parameters=True, **options
    )
    drawn = enumerate(batches(rank, 2, (4, 5), mesh=mesh["dp"]), start=mesh["dp"].get_local_rank())
    train_and_check(pair, ((batch, number % 3) for number, batch in drawn))


@contract("COLLECTIVES-10")
@needs(Capability.FORWARD_METHOD, Capability.COUNTED_UNITS)
def test_method_of_one_unit(rank: Rank) -> None:
    """A method that is registered for one unit gathers no other unit of its class, nor frees it."""
    model = models.TwoEncoders(dim=9)
    for encoder in (model.first, model.second):
        encoder.spare = torch.nn.Linear(3, 3)  # of the encoder's own unit, and used by no method
    run = rank.run(model, units=[["first.inner"], ["first"], ["second.inner"], ["second"]], find_unused_parameters=True)
    run.adapter.register_forward_method("first", "features")
    run.adapter.register_forward_method("first.spare", "forward")  # no unit: user code need not tell them apart
    run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    first: Any = run.original_module("first")
    assert first.features.__name__ == "features", f"the registered method has the name {first.features.__name__}"
    gathered = [item.unit for item in run.trace if (item.phase, item.kind) == ("forward", "all_gather")]
    outer = [unit for unit in gathered if "inner" not in unit]
    # The second one's methods gather its layer, once each.
    assert (len(outer), len(gathered)) == (1, 4), f"forward gathers {gathered}, of which one should be an encoder"


def assert_gathered_in_backward(pair: Pair, step: int, expected: Sequence[str]) -> None:
    """Check which units the last backward gathered, each once."""
    trace = [item for item in pair.last_trace() if (item.phase, item.kind) == ("backward", "all_gather")]
    found = sorted(item.unit for item in trace)
    assert found == sorted(expected), f"in {step_label(step)} backward gathers {found} instead of {sorted(expected)}"


def _sizes(pair: Pair) -> Sequence[tuple[int, int]]:
    """The elements of each unit, without padding and with all declared padding."""
    return [(unit.numel, unit.padded_numel) for unit in pair.units]


@contract("COLLECTIVES-11")
@needs(Capability.UNIT_SETTINGS, Capability.EXPLICIT_PREFETCH, Capability.FORWARD_METHOD)
@subjects(
    "what",
    [
        pytest.param(name, marks=[needs("settings.reduce_scatter_max_input_buffers")] if "input" in name else [])
        for name in WRONG_SETTINGS
    ],
)
def test_settings_that_cannot_be(rank: Rank, what: str) -> None:
    """An invalid setting is refused by name on every rank, and changes nothing."""
    pair = tower(rank)
    change, words = WRONG_SETTINGS[what]
    Refusal(rank, lambda: change(pair.adapter)).check_names(*words)
    train_and_check(pair, batches(rank, 1, (4, 9)))


OF_THE_ROOT_NEEDS = {
    # Where units are wrappers, each of them has these methods.
    "deferring": needs("flat_parameters", Capability.SUMMON_FULL_PARAMS),
    "clipping": needs("flat_parameters", Capability.SUMMON_FULL_PARAMS, Capability.CLIP_BY_CALL),
    "recovering": needs(Capability.UNIT_SETTINGS, Capability.RECOVERY),
}


@contract("COLLECTIVES-11")
@subjects("what", [pytest.param(name, marks=OF_THE_ROOT_NEEDS[name]) for name in OF_THE_ROOT])
def test_calls_that_only_the_root_has(rank: Rank, what: str) -> None:
    """A setting of the root is refused on another unit, by every rank, and changes nothing."""
    pair = tower(rank, clip=Clip(1e-3) if what == "clipping" else None)
    train_and_check(pair, batches(rank, 1, (4, 9)))
    layer = copy.copy(pair.adapter)
    layer.module = pair.adapter.submodule("layers.1")
    Refusal(rank, lambda: OF_THE_ROOT[what](layer)).check_names("root")
    pair.checked_step(rank.batch(1, (4, 9)))


@contract("COLLECTIVES-11")
@needs("settings.reduce_scatter_max_input_buffers")
@pytest.mark.parametrize("number", [1, 3])
def test_inputs_of_reductions(rank: Rank, number: int) -> None:
    """Training is the same for any number of reduction inputs in flight, set for the root or for all units."""
    pair = tower(rank)
    for step, recurse in enumerate([False, True]):
        pair.adapter.change(Settings(reduce_scatter_max_input_buffers=number), recurse=recurse)
        pair.checked_step(rank.batch(step, (4, 9)))
