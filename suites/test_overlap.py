"""Chapter OVERLAP: work that the streams of a device run at the same time, and waits."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardproof.suites.pipelines import train_stages
from shardproof.testing import Capability, Hardware, Pair, Rank, Run, alone, contract, models, needs, world
from shardproof.testing.axes import DELAY_MS, DELAYED, DELAYS, RESHARD
from shardproof.testing.compare import check_exact, each_once, tensors_of
from shardproof.testing.make import (
    Accumulation,
    Adapter,
    Clip,
    Delay,
    Settings,
    cut_over,
    pair_by_units,
    run_by_units,
    tower,
)
from shardproof.testing.measure import Collective, Trace, occupy
from shardproof.testing.train import Mixture, batches, divide_experts, optim, parallel

#: How long a layer computes: far longer than a small collective, and than the host takes to issue a layer.
BUSY_MS = 20.0
DEPTH = 4
LAYERS = [f"layers.{index}" for index in range(DEPTH)]
#: How much longer a reduction takes: long enough to tell whether computation waits for it, shorter than a layer's.
SLOW_MS = BUSY_MS / 4
#: Longer than the host takes to issue a layer, so that it is ahead of every layer's computation.
SHORT_MS = 5.0
#: Far longer than the host takes for three steps of a small model.
OCCUPIED_MS = 1500.0
#: A DDP bucket may outlive its model for a moment, so the models are smaller than the threshold for leaks.
DIM = 17

#: Delays of a third stream too, on which replicas are all-reduced and then copied to the host. With tensor parallelism
#: these are delays of its sums.
ON_THREE_STREAMS = DELAYS | {
    "before-all-reduce": Delay(milliseconds=DELAY_MS, collective="all_reduce"),
    "after-all-reduce": Delay(milliseconds=DELAY_MS, collective="all_reduce", when="after"),
}

ONE_SHARD = needs(Capability.HYBRID, Capability.SINGLE_RANK)


def each_and_all(names: Iterable[str]) -> list[Any]:
    """Tuples of names of delays: none, each alone, all together."""
    alone = [pytest.param((name,), id=name) for name in names]
    return [pytest.param((), id="undelayed"), *alone, pytest.param(tuple(names), id="all-delayed")]


DELAYED_ON_THREE = pytest.mark.parametrize("delays", each_and_all(ON_THREE_STREAMS))

pytestmark = [needs(Capability.SHARDED), world(2)]
#: Late copies to the host, and late gradients that backward adds up, are seen over gloo too (docs/results.md).
STREAMS = needs(Hardware.STREAMS)
LATE_COPIES = needs(Hardware.LATE_COPIES)

#: A word in the names of NCCL's kernels, by the trace's kind of collective.
_KERNELS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
#: A word in the name of the kernel that occupies a stream.
_BUSY = "spin_kernel"


@dataclasses.dataclass(frozen=True)
class Interval:
    """When one kernel ran, in microseconds of the profiler's clock."""

    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Moved(Interval):
    """When the kernel of one collective of the trace ran."""

    collective: Collective


class Timeline:
    """The kernels of one training step, which ``step`` runs.

    Attributes:
        busy: when layers occupied the stream, in the order of time.
        moved: when collectives ran, by kind; of each kind in the order of the trace.

    Raises:
        AssertionError: the profiler has another number of kernels of a kind than the trace has collectives.
    """

    def __init__(self, step: Callable[[], object], trace: Trace) -> None:
        before = len(trace)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        issued = trace[before:]
        kernels = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA"
        )
        self.busy = [Interval(start, end) for start, end, name in kernels if _BUSY in name]
        self.moved: dict[str, list[Moved]] = {}
        for kind, word in _KERNELS.items():
            found = [(start, end) for start, end, name in kernels if "nccl" in name.lower() and word in name]
            expected = [item for item in issued if item.kind == kind]
            assert len(found) == len(expected), (
                f"the profiler saw {len(found)} kernels of {kind} and the trace has {len(expected)}; "
                f"kernels: {sorted({name for *_, name in kernels})}"
            )
            self.moved[kind] = [Moved(start, end, item) for (start, end), item in zip(found, expected, strict=True)]


class Poison:
    """Allocates memory of the sizes of a run's gathered units, shards and collectives, fills it with NaN and frees it.

    It does so on the current stream before and after every unit's forward, when a unit's backward begins, and before
    and after every collective, there on the stream that issues it. Memory that was freed while another stream still
    reads or writes it is allocated here, and what that stream reads is a NaN.

    The run has not trained yet; each of its units is divided among ``shards`` ranks.
    """

    def __init__(self, run: Run, *, shards: int) -> None:
        full = {numel for unit in run.units for numel in (unit.numel, unit.padded_numel)}
        self._numels = full | {-(-numel // shards) for numel in full}
        device = run.adapter.config.mesh.device_type
        self._device = torch.empty(0, device=device).device  # with the index of the rank's own
        for unit in run.units:
            for module in {name.rpartition(".")[0] for name in unit.names}:
                found = run.original_module(module)
                found.register_forward_pre_hook(lambda module, args: self._fill())
                found.register_forward_hook(self._after_forward)
        self._before, self._after = run.recorder.before, run.recorder.after
        run.recorder.before, run.recorder.after = self._before_collective, self._after_collective

    def _fill(self) -> None:
        with torch.no_grad():
            for numel in self._numels:
                torch.empty(numel, dtype=torch.float32, device=self._device).fill_(math.nan)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._fill()
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._fill())

    def _before_collective(self, collective: Collective) -> None:
        # With other parallelism, or parameters on a mesh of their own, a unit's size is not that of its buffers.
        numel = collective.nbytes // torch.float32.itemsize
        self._numels |= {numel, numel // len(collective.group)}
        self._fill()
        self._before(collective)

    def _after_collective(self, collective: Collective) -> None:
        self._after(collective)
        self._fill()


class BusyTower(models.Stacked):
    """MLPs, each of which occupies the stream at the end of its forward and at the start of its backward.

    No two units have the same size, as in ``Tower``. Input and output: (batch, dim).
    """

    def __init__(self, dim: int, depth: int, milliseconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_BusyMLP(dim, 2 + index, milliseconds) for index in range(depth))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(x))
        return out


class _BusyMLP(models.MLP):
    def __init__(self, dim: int, multiplier: int, milliseconds: float) -> None:
        super().__init__(dim, multiplier)
        self.milliseconds = milliseconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Occupying.apply(super().forward(x), self.milliseconds)  # type: ignore[no-untyped-call]
        return out


class _Occupying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, milliseconds: float) -> torch.Tensor:
        ctx.milliseconds = milliseconds
        occupy(milliseconds, device_type=x.device.type)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        occupy(ctx.milliseconds, device_type=gradient.device.type)
        return gradient.clone(), None


@contract("OVERLAP-1")
@STREAMS
@world(2, 4)
@alone()
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
def test_collectives_overlap_with_computation(rank: Rank) -> None:
    """Gathers end while the previous unit computes, in forward and backward, and reductions while the next one does."""
    slow = Delay(milliseconds=SLOW_MS, collective="reduce_scatter")
    model = BusyTower(dim=DIM, depth=DEPTH, milliseconds=BUSY_MS)
    run = run_by_units(rank, model, reshard_after_forward=True, optimizer=optim.sgd(), delays=[slow])
    batches = [(rank.batch(step, (4, DIM)),) for step in range(3)]
    for batch in batches[:2]:
        run.step([batch], loss=models.mean_square)
    timeline = Timeline(lambda: run.step([batches[2]], loss=models.mean_square), run.trace)
    timeline.busy = [interval for interval in timeline.busy if interval.end - interval.start > 1000 * BUSY_MS / 2]
    assert len(timeline.busy) == 2 * DEPTH, f"layers were busy {len(timeline.busy)} times instead of {2 * DEPTH}"
    forward = dict(zip(LAYERS, timeline.busy[:DEPTH], strict=True))
    backward = dict(zip(LAYERS[::-1], timeline.busy[DEPTH:], strict=True))
    for before, layer in itertools.pairwise(LAYERS):
        assert_overlaps(timeline, ("all_gather", "forward", layer), before, forward[before])
        assert_overlaps(timeline, ("all_gather", "backward", before), layer, backward[layer])
        reduced = assert_overlaps(timeline, ("reduce_scatter", "backward", layer), before, backward[before])
        early = (backward[before].start - reduced.end) / 1000
        assert early < 0, f"{before} computes its backward {early:.2f} ms after {layer} is reduced: it waited for it"


def assert_overlaps(timeline: Timeline, moved: tuple[str, str, str], computes: str, computed: Interval) -> Interval:
    """Check that the one collective of a kind, phase and unit ended before another unit's computation; return it."""
    kind, phase, unit = moved
    found = [item for item in timeline.moved[kind] if (item.collective.phase, item.collective.unit) == (phase, unit)]
    assert len(found) == 1, f"{phase} has {len(found)} {kind} of {unit} instead of 1"
    late = (found[0].end - computed.end) / 1000
    assert late < 0, f"the {kind} of {unit} ends {late:.2f} ms after {computes} has computed its {phase}: no overlap"
    return found[0]


@contract("OVERLAP-2")
@STREAMS
@needs(Capability.HOST_RUNS_AHEAD)
@pytest.mark.parametrize(
    "how", ["plain", "kept", "clipped", "accumulated", pytest.param("replicas", marks=needs(Capability.SINGLE_RANK))]
)
def test_host_runs_ahead(rank: Rank, how: str) -> None:
    """The host enqueues three steps while the stream is still occupied by earlier work."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "kept": {"reshard_after_forward": False},
        "clipped": {"clip": Clip(max_norm=0.01)},
        "accumulated": {"microbatches": 2, "accumulation": Accumulation()},
        "replicas": {"mesh": rank.mesh((2, 1), ("replicate", "shard"))},
    }
    run = run_by_units(rank, models.Tower(dim=DIM), optimizer=optim.sgd(), pictures=False, **options[how])
    microbatches = run.adapter.config.microbatches
    batches = [
        [(rank.batch(step, (4, DIM), microbatch=number),) for number in range(microbatches)] for step in range(5)
    ]
    for batch in batches[:2]:
        run.step(batch, loss=models.mean_square)
    torch.accelerator.synchronize()
    occupy(OCCUPIED_MS, device_type=rank.device.type)
    behind = torch.get_device_module(rank.device).Event()
    behind.record()
    for number, batch in enumerate(batches[2:]):
        run.step(batch, loss=models.mean_square)
        assert not behind.query(), (
            f"step {number} returned only once work had ended that occupied the stream for {OCCUPIED_MS:.0f} ms "
            "before it: the host waited for the device"
        )


@contract("OVERLAP-4")
@STREAMS
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", pytest.param("all_reduce", marks=ONE_SHARD)])
def test_one_rank_is_late(rank: Rank, kind: str, when: Any) -> None:
    """A collective that one rank issues late, or goes on from late, changes no number."""
    size = rank.world_size
    mesh = rank.mesh((size, 1), ("replicate", "shard")) if kind == "all_reduce" else rank.mesh()
    late = Delay(milliseconds=DELAY_MS, collective=kind, when=when, ranks=(size - 1,))
    train(rank, tower(rank, dim=DIM, mesh=mesh, delays=[late]))


@contract("OVERLAP-5")
@STREAMS
@pytest.mark.parametrize("delays", DELAYED)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_memory_is_not_reused_early(
    rank: Rank, reshard_after_forward: bool | int | None, delays: tuple[str, ...]
) -> None:
    """Memory in which collectives and computation still read or write is not handed out again."""
    pair = busy_pair(rank, delays, reshard_after_forward=reshard_after_forward)
    train_poisoned(rank, pair, shards=rank.world_size)


@contract("OVERLAP-5")
@STREAMS
@world(4)
@needs(Capability.HYBRID)
@DELAYED_ON_THREE
def test_memory_of_replicas_is_not_reused_early(rank: Rank, delays: tuple[str, ...]) -> None:
    """Memory of reductions over replicas, on a stream of their own, is not reused while they read or write it."""
    mesh = rank.mesh((rank.world_size // 2, 2), ("replicate", "shard"))
    train_poisoned(rank, busy_pair(rank, delays, mesh=mesh), shards=2)


@contract("OVERLAP-8")
@LATE_COPIES
@world(4)
@needs(Capability.HYBRID, Capability.OFFLOAD)
@DELAYED_ON_THREE
@pytest.mark.parametrize(
    "skips",
    [
        "nothing",
        pytest.param("reduction", marks=needs(Capability.DEFERRED_REDUCTION)),
        pytest.param("all-reduce", marks=needs(Capability.DEFERRED_REDUCTION, "accumulation.skips")),
    ],
)
def test_offloaded_replicas(rank: Rank, skips: Any, delays: tuple[str, ...]) -> None:
    """Gradients of replicas are in pinned memory when backward ends, from memory that no later reduction has taken.

    Each backward reduces, or the first defers its reduction, or its all-reduce alone.
    """
    options: Any = {"mesh": rank.mesh((2, 2), ("replicate", "shard")), "offload": "pinned", "microbatches": 2}
    if skips != "nothing":
        options["accumulation"] = Accumulation(skips=skips)
    train_poisoned(rank, busy_pair(rank, delays, **options), shards=2, microbatches=2)


@contract("OVERLAP-9")
@STREAMS
@world(4)
@needs(
    "parameter_meshes",
    Capability.TENSOR_PARALLEL,
    Capability.UNIT_SETTINGS,
    "gradient_divide_factors",
    Capability.EXPLICIT_PREFETCH,
)
@pytest.mark.parametrize("prefetches", [False, True], ids=["in-order", "prefetched"])
@pytest.mark.parametrize("delays", each_and_all(DELAYS))
def test_streams_of_experts(rank: Rank, delays: tuple[str, ...], prefetches: bool) -> None:
    """Units with parameters on two meshes, as experts and their routers, wait for the collectives of both.

    Their buffers are in flight at the same time, also those of a unit that is gathered ahead.
    """
    mesh = rank.mesh((2, 2), ("dp", "ep"), joined=("dp", "ep"))
    model, dense, layers = Mixture(DIM), mesh["dp_ep"], ("layers.0", "layers.1")
    pair = pair_by_units(
        rank, model, mesh=dense, delays=[DELAYS[name] for name in delays],
        prepare=lambda plain: keep_busy(divide_experts(plain, mesh["ep"]), layers),
        parameter_meshes={f"{layer}.experts": mesh["dp"] for layer in layers},
    )  # fmt: skip
    # By all that have rows, on both meshes.
    pair.adapter.change(Settings(gradient_divide_factor=dense.size(), force_sum_reduction_for_comms=True), recurse=True)
    if prefetches:
        pair.adapter.prefetch(forward={layers[0]: layers[1:]}, backward={layers[1]: layers[:1]})
    train_poisoned(rank, pair, shards=dense.size(), mesh=dense)


@contract("OVERLAP-10")
@LATE_COPIES
@world(4)
@needs(Capability.TENSOR_PARALLEL)
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@DELAYED_ON_THREE
def test_streams_of_tensor_parallel_shards(rank: Rank, delays: tuple[str, ...], sequence: bool) -> None:
    """Shards of tensor-parallel parameters are gathered and reduced in order with the sums over the other mesh."""
    mesh, model = rank.mesh((2, 2), ("dp", "tp")), parallel.MLPStack(DIM, normed=sequence)
    cut = cut_over(mesh, parallel.parallelize_mlps, sequence=sequence)
    plan, layers = cut.pop("prepare"), [name for (name,) in model.units()]
    # Sequences have no all-reduce of a layer: theirs are those of gradients that are pending sums.
    pair = pair_by_units(
        rank, model, delays=[ON_THREE_STREAMS[name] for name in delays],
        prepare=lambda plain: keep_busy(plan(plain), layers), **cut,
    )  # fmt: skip
    # The mean square of what a norm returns hardly depends on the parameters, whose gradients would be rounding.
    loss = models.ramp_square if sequence else models.mean_square
    train_poisoned(rank, pair, shards=2, mesh=mesh["dp"], shape=(4, 6, DIM) if sequence else (4, DIM), loss=loss)


@contract("OVERLAP-11")
@STREAMS
@world(4)
@needs(Capability.AUTOGRAD_CALLS, Capability.OWN_OPTIMIZER)
@pytest.mark.parametrize(
    ("schedule", "calls", "shares"),
    [
        pytest.param("1F1B", "one", False, id="1F1B"),
        pytest.param(
            "1F1B", "two-deferred", False, id="1F1B-deferred", marks=needs(Capability.MANUAL_BACKWARD_FINALIZATION)
        ),
        pytest.param("Interleaved1F1B", "one", True, id="shared-context", marks=needs(Capability.SHARE_COMM_CTX)),
    ],
)
@pytest.mark.parametrize("delays", each_and_all(name for name, one in DELAYS.items() if one.at == "collective"))
def test_streams_of_pipeline_stages(
    rank: Rank, delays: tuple[str, ...], schedule: str, calls: str, shares: bool
) -> None:
    """Stages that are sharded over two ranks each train as one model does, whichever stream of theirs is late."""
    train_stages(
        rank, schedule=schedule, calls=calls, shares=shares, delays=[DELAYS[name] for name in delays],
        watch=functools.partial(Poison, shards=2),
    )  # fmt: skip


def busy_pair(rank: Rank, delays: tuple[str, ...], **options: Any) -> Pair:
    """A pair of layers that occupy the stream (collective)."""
    model = BusyTower(dim=DIM, depth=3, milliseconds=SHORT_MS)
    return pair_by_units(rank, model, delays=[ON_THREE_STREAMS[name] for name in delays], **options)


def keep_busy(model: nn.Module, layers: Iterable[str]) -> nn.Module:
    """Let layers occupy the stream as those of :class:`BusyTower` do; called before the model is sharded."""
    for name in layers:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output: _Occupying.apply(output, SHORT_MS)  # type: ignore[no-untyped-call]
        )
    return model


def train_poisoned(rank: Rank, pair: Pair, *, shards: int, **drawn: Any) -> None:
    """Train a pair, of whose sharded run freed memory is overwritten at once (collective)."""
    Poison(pair.sharded, shards=shards)
    train(rank, pair, **drawn)


@contract("OVERLAP-7")
@STREAMS
@needs(Capability.POST_ACCUMULATE_GRAD_HOOK)
def test_step_waits_for_hooks(rank: Rank) -> None:
    """Work that a hook enqueues on a reduced gradient is done before the optimizer reads the gradient."""
    model, pictures = models.Tower(dim=DIM), []
    for by_hook in (True, False):
        double = None if by_hook else double_gradients
        run = run_by_units(rank, models.copy_of(model), optimizer=optim.sgd(), after_backward=double)
        if by_hook:
            for parameter in each_once(run.adapter.held_parameters()).values():
                parameter.register_post_accumulate_grad_hook(double_late)
        batches = [(rank.batch(step, (4, DIM)),) for step in range(2)]
        pictures.append([run.step([batch], loss=models.mean_square) for batch in batches])
    for step, (hooked, plain) in enumerate(zip(*pictures, strict=True)):
        check_exact(rank, hooked, plain, step=step, why="doubling is exact, whoever does it")


def double_late(parameter: torch.Tensor) -> None:
    """Occupy the current stream, and double the gradient."""
    assert parameter.grad is not None
    occupy(SLOW_MS, device_type=parameter.device.type)
    parameter.grad.mul_(2)


def double_gradients(adapter: Adapter) -> None:
    """Double all gradients, between backward and step."""
    for parameter in each_once(adapter.held_parameters()).values():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


@contract("OVERLAP-6")
@STREAMS
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_training_on_another_stream(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A model that trains on a stream other than the default one trains the same, also next to work on that one."""
    pair = tower(rank, dim=DIM, reshard_after_forward=reshard_after_forward)
    batches = [rank.batch(step, (4, DIM)) for step in range(3)]
    module = torch.get_device_module(rank.device)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    # After this work, the default stream would deliver too late whatever waits for it or is computed on it.
    occupy(DELAY_MS, device_type=rank.device.type)
    with module.stream(stream):
        for batch in batches:
            pair.step(batch)
    stream.synchronize()
    pair.check()


def train(
    rank: Rank,
    pair: Pair,
    shape: tuple[int, ...] = (4, DIM),
    loss: Callable[..., torch.Tensor] = models.mean_square,
    **drawn: Any,
) -> None:
    """Train three steps that follow each other without the host waiting, and compare them (collective)."""
    # Made in advance: copying them to the device would wait for the step before.
    for batch in list(batches(rank, 3, shape, **drawn)):
        pair.step(batch, loss=loss)
    pair.check()
