"""Chapter MEMORY: the memory in which units are gathered while a step runs."""

import collections
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardproof.testing import Capability, Hardware, Rank, Run, alone, contract, models, needs, world
from shardproof.testing.axes import RESHARD, RESHARD_FREES
from shardproof.testing.compare import step_label
from shardproof.testing.make import Adapter, Precision, Settings, run_by_units, tower
from shardproof.testing.measure import ROOT, Census, bytes_of, memory
from shardproof.testing.train import optim, shapes

DEPTH = 5
#: On a device the bytes of a unit may be freed once the kernels that read them have run: those of this many units.
BEHIND = 2
LAYERS = [f"layers.{index}" for index in range(DEPTH)]

pytestmark = [needs(Capability.SHARDED), world(2)]


@contract("MEMORY-1")
@world(2, 4)
@needs(Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_FREES)
def test_units_are_freed_behind_the_computation(rank: Rank, reshard_after_forward: bool | int) -> None:
    """When a unit begins, in forward and in backward, units that have finished hold no gathered bytes."""
    model = models.Tower(dim=9, depth=DEPTH)
    full = {
        f"layers.{index}": 4 * sum(p.numel() for p in layer.parameters()) for index, layer in enumerate(model.layers)
    }
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    census = Census(pair.sharded)
    for step in range(2):
        census.moments.clear()
        pair.step(rank.batch(step, (4, 9)))
        order = {"forward": [*LAYERS, ROOT], "backward": [ROOT, *LAYERS[::-1]]}
        for phase, units in order.items():
            moments = [moment for moment in census.moments if moment.phase == phase]
            assert [moment.unit for moment in moments] == units, f"units that began their {phase}: {moments}"
            for number, moment in enumerate(moments):
                # Resharded to a subgroup, a unit may hold its shard of that subgroup until backward needs it.
                allowed = 0 if reshard_after_forward is True or phase == "backward" else 0.75
                held = {unit: moment.held.get(unit, 0) for unit in units[:number] if unit != ROOT}
                kept = {unit: nbytes for unit, nbytes in held.items() if nbytes > allowed * full[unit]}
                assert len(kept) <= (0 if rank.device.type == "cpu" else BEHIND), (
                    f"when the {phase} of {moment.unit} begins in {step_label(step)}, these units are done with and "
                    f"still gathered (bytes): {kept}"
                )
        if rank.device.type == "cpu":
            assert not census.held(), f"after {step_label(step)} units are gathered (bytes): {census.held()}"
        pair.check()


class _Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Gather:
    """An all-gather of user code that knows the memory of its outputs, of which no thread of a backend holds any."""

    def __init__(self) -> None:
        self._outputs: list[StorageWeakRef] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        output = torch.empty(*size, dtype=dtype, device=device)
        self._outputs.append(StorageWeakRef(output.untyped_storage()))
        return output

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False, **_: Any
    ) -> dist.Work | None:
        received = torch.empty_like(output_tensor)
        dist.all_gather_into_tensor(received, input_tensor.clone(), group=group)
        output_tensor.copy_(received)
        return _Done() if async_op else None

    def held(self) -> int:
        """The bytes of its outputs."""
        return sum(map(bytes_of, self._outputs))


class _Outputs(Census):
    """Counts the bytes of the outputs from which units are copied, instead of those of their parameters."""

    def __init__(self, run: Run) -> None:
        self._gathers = {unit.label: _Gather() for unit in run.units}
        super().__init__(run)
        for label, gather in self._gathers.items():
            run.adapter.change(Settings(custom_all_gather=gather), unit="" if label == ROOT else label)

    def held(self) -> dict[str, int]:
        counted = {label: gather.held() for label, gather in self._gathers.items()}
        return {label: nbytes for label, nbytes in counted.items() if nbytes}


@contract("MEMORY-1")
@needs(Capability.UNIT_SETTINGS, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=needs(Capability.ASYNC_UNSHARD))])
def test_outputs_of_gathers_are_freed(rank: Rank, ahead: bool) -> None:
    """A gather's output is freed when parameters are copied from it; in forward, at the latest, when the next are.

    With ``ahead`` user code has started all gathers before forward, which then holds no output for the next.
    """
    pair = tower(rank, reshard_after_forward=True)
    layers = [name for name in LAYERS if name in {unit.label for unit in pair.sharded.units}]
    census = _Outputs(pair.sharded)
    for step in range(2):
        if ahead:
            pair.adapter.unshard()
        census.moments.clear()
        pair.step(rank.batch(step, (4, 9)))
        # The root is gathered first in forward; its layer computes when all others have been.
        order = {"forward": [*layers, ROOT], "backward": [ROOT, *layers[::-1]]}
        assert [(one.phase, one.unit) for one in census.moments] == [(it, name) for it in order for name in order[it]]
        for moment in census.moments:
            later = order[moment.phase][order[moment.phase].index(moment.unit) + 1 :]
            if moment.phase == "backward":
                allowed = {*later[:1]}  # gathered ahead
            elif ahead:
                allowed = {*later} - {ROOT}
            else:
                allowed = {moment.unit if moment.unit != ROOT else layers[-1]}
            assert moment.held.keys() <= allowed, (
                f"when the {moment.phase} of {moment.unit} begins in {step_label(step)}, these outputs of gathers are "
                f"not freed (bytes): {moment.held}; only {allowed or 'none'} may be left"
            )
        assert not census.held(), f"after {step_label(step)} these outputs of gathers are left (bytes): {census.held()}"
        pair.check()


@contract("MEMORY-7")
@world(2, 4)
@needs("settings.keep_unsharded_storage", Capability.UNIT_SETTINGS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_FREES)
@pytest.mark.parametrize("recurse", [True, False])
def test_addresses_over_steps(rank: Rank, recurse: bool, reshard_after_forward: bool | int) -> None:
    """Gathered storages of all units, or of the root's own, stay where they are, with the values of each step.

    They hold their bytes until user code takes the choice back, and units without the choice free theirs.
    """
    pair = tower(rank, reshard_after_forward=reshard_after_forward)
    census, kept = Census(pair.sharded), {unit.label for unit in pair.sharded.units if recurse or unit.label == ROOT}
    pair.adapter.change(Settings(keep_unsharded_storage=True), recurse=recurse)
    addresses: list[dict[str, list[int]]] = []
    for step in range(3):
        pair.checked_step(rank.batch(step, (4, 9)))
        addresses.append(census.addresses())
        freed = [moment for moment in census.moments if step and kept - moment.held.keys()]
        assert not freed, f"in {step_label(step)} {kept} hold their bytes, but at these moments: {freed}"
        census.moments.clear()
        held = addresses[step].keys() if rank.device.type == "cpu" else addresses[step].keys() & kept
        assert held == kept, f"{held} hold their bytes after {step_label(step)} instead of {kept}"
    moved = [label for label in kept if any(found[label] != addresses[0][label] for found in addresses)]
    assert not moved, f"the gathered storages of {moved} have other addresses in another step: {addresses}"
    pair.adapter.change(Settings(keep_unsharded_storage=False), recurse=recurse)
    pair.checked_step(rank.batch(3, (4, 9)))
    left = kept & census.held().keys()
    assert len(left) <= (0 if rank.device.type == "cpu" else BEHIND), f"{left} hold bytes that they are to free"


@contract("MEMORY-3")
@world(2, 4)
@needs(Capability.UNUSED_OUTPUT)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_everything_is_freed_when_backward_ends(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """When backward ends nothing is gathered, not even units that ran and got no gradient, and no call helps."""
    seen: list[dict[str, int]] = []
    census: Census
    options: dict[str, Any] = {
        "find_unused_parameters": True,
        "after_backward": lambda adapter: seen.append(census.held()),
    }
    options |= {"baseline": "replicated", "reshard_after_forward": reshard_after_forward}
    pair = rank.pair(models.TwoHeads(dim=25), units=[["head0"], ["head1"]], **options)
    census = Census(pair.sharded)
    for step, loss in enumerate([models.both_heads, models.first_head, models.both_heads, models.first_head]):
        pair.step(rank.batch(step, (2, 25)), loss=loss)
    pair.check()
    allowed = 0 if rank.device.type == "cpu" else BEHIND
    for step, held in enumerate(seen):
        ended = f"when the backward of {step_label(step)} has ended"
        assert len(held) <= allowed, f"{ended}, units are gathered (bytes): {held}"
    assert len(seen) == 4


#: A layer's bytes: large enough that memory kept by libraries and the allocator does not count.
WIDTH = 1024
LAYER = 4 * WIDTH * WIDTH
#: Small compared to a layer: activations, the scalars of the loss, the optimizer's.
CRUMBS = LAYER // 8


MESHES = pytest.mark.parametrize(
    "mesh", ["shards", pytest.param("replicas", marks=needs(Capability.SINGLE_RANK, Capability.HYBRID))]
)


@contract("MEMORY-2")
@alone()
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
@MESHES
def test_memory_between_steps(rank: Rank, mesh: str) -> None:
    """Between steps a rank holds its share of parameters and momentum, and of gradients only until they are None."""
    run, without, share = _layers(rank, 4, mesh)
    for step in range(2):
        run.forward_backward((rank.batch(step, (1, WIDTH)),), loss=models.mean_square)
        run.adapter.step()
        run.adapter.zero_grad(set_to_none=True)
    limit = 2 * share + CRUMBS
    held = memory.settled_bytes(rank.device, limit=without + limit) - without
    assert held <= limit, (
        f"between steps a rank holds {held / share:.2f} times its share of the parameters; with their momentum it is 2"
    )


@contract("MEMORY-2")
@world(4)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((1, 4), {}, id="shards"),
        pytest.param(
            (1, 4), {"reshard_after_forward": 2}, id="resharded-to-two", marks=needs(Capability.RESHARD_TO_SIZE)
        ),
        pytest.param(
            (2, 2), {"precision": Precision(reduce_dtype=torch.bfloat16)}, id="replicas-reduced-in-bfloat16",
            marks=needs(Capability.HYBRID, "precision.reduce_dtype"),
        ),
    ],
)  # fmt: skip
def test_backward_allocates_only_gradients(rank: Rank, shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Once gradients are None, a forward and a backward have left no bytes: nothing that was gathered or reduced."""
    mesh = {"mesh": rank.mesh(shape, ("replicate", "shard"))} if shape[0] > 1 else {}
    run = run_by_units(rank, models.Tower(dim=33), pictures=False, **options, **mesh)
    before = memory.held_bytes(rank.device)
    for step in range(2):
        run.forward_backward((rank.batch(step, (2, 33)),), loss=models.mean_square)
        run.adapter.zero_grad(set_to_none=True)
        run.trace.clear()
        limit = before + 4 * 33 * 16  # scalars, and the rows by which shards of uneven sizes are padded
        after = memory.settled_bytes(rank.device, limit=limit)
        assert after <= limit, (
            f"{step_label(step)} leaves {after - before} bytes besides the {before} there were before"
        )


@contract("MEMORY-5")
@alone()
@needs(Hardware.ACCELERATOR, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
@MESHES
def test_peaks(rank: Rank, mesh: str) -> None:
    """The memory that forward and backward add is bounded, however many units there are."""
    for depth in (4, 12):
        run, _, share = _layers(rank, depth, mesh)
        peaks = _peaks(rank, run)
        for phase, allowed in IN_WHOLE.items():
            # Gradients that a step had set to None are allocated again.
            most = allowed * LAYER + (share if phase == "backward" else 0)
            assert peaks[phase] <= most + CRUMBS, (
                f"{phase} of {depth} layers adds {peaks[phase] / LAYER:.2f} layers; {most / LAYER:.2f} are allowed"
            )


#: How many full units a phase may hold. In forward: the one that computes, and the next one in the memory of the
#: gather and in that of its parameters. In backward: the one that computes, its gradients, the gather of the next one,
#: and the input of the reduction in flight.
IN_WHOLE = {"forward": 3, "backward": 4}


def _layers(rank: Rank, depth: int, mesh: str) -> tuple[Run, int, int]:
    """Shard so many layers; also the bytes held without them, and a rank's share of their parameters in bytes."""
    shape = {"shards": (1, rank.world_size), "replicas": (rank.world_size, 1)}[mesh]
    options: dict[str, Any] = {"mesh": rank.mesh(shape, ("replicate", "shard"))} if mesh == "replicas" else {}
    model = shapes.EqualLayers(WIDTH, depth).to(rank.device)
    _allocate_workspaces(rank)
    without = memory.held_bytes(rank.device) - memory.bytes_of(model.parameters())
    options |= {"reshard_after_forward": True, "optimizer": optim.sgd(), "pictures": False}
    return rank.run(model, units=model.units(), **options), without, depth * LAYER // shape[1]


def _peaks(rank: Rank, run: Run) -> dict[str, int]:
    """The most bytes that forward and backward of the third step add to those allocated before it."""
    marks: list[int] = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        marks.append(memory.peak_bytes(rank.device))
        memory.forget_peak(rank.device)
        return models.mean_square(output)

    for step in range(3):
        batch = rank.batch(step, (1, WIDTH))
        held = memory.held_bytes(rank.device)
        marks.clear()
        memory.forget_peak(rank.device)
        run.forward_backward((batch,), loss=loss)
        marks.append(memory.peak_bytes(rank.device))
        run.adapter.step()
        run.adapter.zero_grad(set_to_none=True)
    return dict(zip(IN_WHOLE, (mark - held for mark in marks), strict=True))


def _allocate_workspaces(rank: Rank) -> None:
    """Let the matrix libraries allocate their workspaces, in the threads of forward and backward."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, device=rank.device)
    layer(rank.batch(0, (1, WIDTH)).requires_grad_()).sum().backward()


#: After so many steps every object that lives as long as the model has been made.
SETTLED = 3


@contract("MEMORY-4")
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_fifty_steps_hold_no_more_than_the_third(rank: Rank, reshard_after_forward: bool | None) -> None:
    """From the third step on, tensors, hooks, threads and objects of Python grow no more, whatever the batch."""
    run = run_by_units(
        rank, models.Tower(dim=9), reshard_after_forward=reshard_after_forward, optimizer=optim.sgd(), pictures=False
    )
    counts = []
    gathers = Capability.ASYNC_UNSHARD in rank.implementation.capabilities()
    for step in range(SETTLED + 50):
        # An evaluation, a dropped forward, a call that gathers and one microbatch of another size in between.
        if step % 3 == 1:
            run.evaluate((rank.batch(0, (2, 9)),))
        if step % 3 == 2:
            run.adapter.forward(rank.batch(0, (5, 9)))
        if gathers:
            run.adapter.unshard(waits=True)
        run.step([(rank.batch(0, (1 + step % 4, 9)),)], loss=models.mean_square)
        run.trace.clear()
        if step in (SETTLED - 1, SETTLED + 49):
            counts.append(held_by(run.adapter, rank.device))
    first, last = counts
    # A thread of the communication library may hold the last collective's tensors for a moment, and a few objects of
    # the interpreter come and go. A leak in every step would be fifty times as much.
    largest = 4 * max(unit.padded_numel for unit in run.units)
    allowed = {"objects": 50, "tensors": 2, "bytes of tensors": 2 * largest}
    grown = {name: (first[name], last[name]) for name in first if last[name] > first[name] + allowed.get(name, 0)}
    assert not grown, f"what is held after the third step and fifty steps later: {grown}"


def held_by(adapter: Adapter, device: torch.device) -> dict[str, int]:
    """Count the process's objects and bytes, after garbage collection."""
    memory.collect_garbage()
    found = gc.get_objects()
    hooks = (
        "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
        "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    )  # fmt: skip
    of_tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
    tensors = [*adapter.module.parameters(), *adapter.module.buffers()]
    return {
        "bytes of tensors": memory.tensor_bytes(device),
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in found),
        "hooks of modules": sum(len(getattr(one, name)) for one in adapter.module.modules() for name in hooks),
        "hooks of tensors": sum(len(getattr(one, name, None) or ()) for one in tensors for name in of_tensors),
        "threads": threading.active_count(),
        "objects": len(found),
    }


@contract("MEMORY-4")
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize(
    "end",
    [
        *("after-a-step", "after-an-evaluation"),
        pytest.param("registration-of-a-method", marks=needs(Capability.FORWARD_METHOD)),
        pytest.param("before-a-backward", marks=needs(Capability.AUTOGRAD_CALLS)),
        *("exception-in-forward", "exception-in-backward"),
    ],
)
def test_deleted_model_is_freed_at_once(rank: Rank, end: str, reshard_after_forward: bool | None) -> None:
    """When the last reference to a model goes, its modules and tensors go too, without the garbage collector.

    A backward that is still to come runs nevertheless.
    """
    model = models.Tower(dim=9)
    config = rank.config(units=model.units(), reshard_after_forward=reshard_after_forward)
    memory.collect_garbage()
    gc.disable()
    try:
        adapter: Any = rank.implementation(model.to(rank.device), optimizer=optim.sgd(), config=config)
        held = {f"module {name or '(root)'}": weakref.ref(module) for name, module in model.named_modules()}
        del model
        for step in range(2):
            adapter.backward(models.mean_square(adapter.forward(rank.batch(step, (4, 9)))))
            adapter.step()
            adapter.zero_grad(set_to_none=True)
        finish(adapter, end, rank.batch(2, (4, 9)))
        loss = models.mean_square(adapter.forward(rank.batch(2, (4, 9)))) if end == "before-a-backward" else None
        held |= {f"parameter {name}": weakref.ref(one) for name, one in adapter.named_parameters().items()}
        adapter.teardown()
        del adapter
        if loss is not None:
            loss.backward()
        del loss
        memory.finish_backward(rank.device)
        alive = [name for name, reference in held.items() if reference() is not None]
        kinds = collections.Counter(name.partition(" ")[0] for name in alive)
    finally:
        gc.enable()
    assert not alive, f"deleted after the {end}, of the model {dict(kinds)} are alive, such as {alive[0]}"


class Injected(Exception):
    """The error that is injected on all ranks."""


def finish(adapter: Adapter, end: str, batch: torch.Tensor) -> None:
    """Do the last thing with a model before it is deleted."""

    def fail(*_: Any) -> None:
        raise Injected

    if end == "registration-of-a-method":
        adapter.register_forward_method("layers.1", "extra_repr")  # any method of its class; it need not run
    if end == "after-an-evaluation":
        with torch.no_grad():
            adapter.forward(batch)
    if end.startswith("exception"):
        module = adapter.submodule("layers.1.in_proj")
        if end == "exception-in-forward":
            handle = module.register_forward_pre_hook(fail)
        else:
            handle = module.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        try:
            adapter.backward(models.mean_square(adapter.forward(batch)))
        except Injected:
            pass
        else:
            raise AssertionError("nothing was raised")
        handle.remove()
