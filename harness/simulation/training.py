"""Builds, shards and trains a model on one rank of a simulated world, and notes what that costs."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory
from shardproof.harness.collectives.recorder import Recorder
from shardproof.harness.collectives.trace import Trace
from shardproof.harness.collectives.units import UnitLookup, UnitSize, units_of
from shardproof.harness.models import optim
from shardproof.harness.simulation.memory import Kind, Ledger, Usage
from shardproof.harness.simulation.tensors import Tensors
from shardproof.harness.simulation.world import SimulatedWorld, simulated_world
from shardproof.harness.tensors import memory, private
from shardproof.harness.tensors.trees import local_of, tensors_of

#: The phases, in their order.
PHASES = ("build", "shard", "inputs", "around", "forward", "backward", "clip", "step", "zero")


@dataclasses.dataclass(frozen=True)
class LocalTensorMeta:
    """The shape of what one rank holds of a tensor, and its dtype without the "torch." prefix."""

    shape: tuple[int, ...]
    dtype: str


class Simulation:
    """One model, sharded by one implementation on one rank of a simulated world.

    Tensors have no memory: values do not exist, and what depends on them, such as whether a gradient is infinite,
    fails. What allocates, frees and communicates runs as in a real world.

    Args:
        build: makes the unsharded model; called with torch's default device set to that of the world.
        config: how to shard the model, on a mesh of the world.
        prepare: changes the model before it is sharded, such as for tensor parallelism, and returns it.
        as_on_a_device: whether buffers live as long as on a device with streams; False is what a CPU does.

    Attributes:
        units: the units of the model, the root's own last.
        parameters: the shape of each parameter before it was sharded, by name; without what tensor parallelism cut.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        implementation: type[Adapter],
        build: Callable[[], nn.Module],
        *,
        config: Config,
        optimizer: OptimizerFactory | None = None,
        prepare: Callable[[nn.Module], nn.Module] | None = None,
        as_on_a_device: bool = True,
    ) -> None:
        self.world, self.config = world, config
        self.ledger, self._tensors = Ledger(), Tensors()
        self.recorder = Recorder()
        self._surroundings = implementation.as_on_a_device if as_on_a_device else contextlib.nullcontext
        self._steps = 0
        with self._during("build"), world.device:
            model = build()
        self.parameters = {name: tuple(value.shape) for name, value in model.named_parameters()}
        self.units: list[UnitSize] = units_of(
            model, config.units, traits=implementation.traits, size=config.shard_size, ignored=config.ignored_params
        )
        self.recorder = Recorder(UnitLookup(self.units))
        with self._during("shard"):
            model = prepare(model) if prepare else model
            self.adapter = implementation(model, optimizer=optimizer, config=config)
            del model
        memory.collect_garbage()
        self.ledger.mark_sharded(self.adapter.module.buffers())

    @property
    def trace(self) -> Trace:
        """The collectives so far, with those of the phase "shard"."""
        return self.recorder.trace

    def step(
        self, inputs: Callable[[], tuple[Any, ...]], *, loss: Callable[..., torch.Tensor], set_to_none: bool = True
    ) -> Trace:
        """Train one optimizer step, and return its collectives.

        ``inputs`` makes the arguments of one microbatch's forward; as many are trained as the configuration has.
        ``loss`` maps a forward's output to a scalar. Gradients are set to None after the step, or else to zeros.
        """
        adapter, config, before = self.adapter, self.config, len(self.trace)
        memory.collect_garbage()
        self.ledger.step, self._steps = self._steps, self._steps + 1
        for number in range(config.microbatches):
            with self._during("inputs"):
                given = inputs()
            with self._microbatch(is_last=number == config.microbatches - 1):
                with self._during("forward"):
                    value = loss(adapter.forward(*given))
                    value = value * config.microbatches if adapter.traits.divides_by_microbatches else value
                with self._during("backward"):
                    adapter.backward(value)
            del value, given
        self.ledger.mark_reduced()
        self._mark()
        if config.clip is not None and adapter.traits.clips == "call":
            with self._during("clip"):
                adapter.clip()
        with self._during("step"):
            adapter.step()
        self._mark()
        with self._during("zero"):
            adapter.zero_grad(set_to_none=set_to_none)
        return Trace(self.trace[before:])

    def held(self) -> Usage:
        """Return what this rank holds now, between two steps, after garbage collection."""
        memory.collect_garbage()
        return self.ledger.held()

    def layout(self) -> dict[str, LocalTensorMeta]:
        """Return what this rank holds of each parameter, by names of the original model."""
        return {name: _layout(value) for name, value in self.adapter.held_parameters().items()}

    def optimizer_layout(self) -> dict[str, dict[str, LocalTensorMeta]]:
        """Return what this rank holds of each parameter's optimizer state, by key."""
        optimizer = self.adapter.optimizer
        if optimizer is None:
            return {}
        return {
            name: {
                key: _layout(one)
                for key, one in optimizer.state.get(value, {}).items()
                if isinstance(one, torch.Tensor)
            }
            for name, value in self.adapter.held_parameters().items()
        }

    def close(self) -> None:
        """Tear down the adapter and drop the model."""
        self.adapter.teardown()
        del self.adapter
        memory.collect_garbage()

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        """Run something without memory, and note its collectives and its allocations.

        Objects in circles are freed between steps, not whenever the collector happens to run.
        """
        assert phase in PHASES, phase
        enabled = gc.isenabled()
        gc.disable()
        try:
            watching = self.ledger.during(phase), self.recorder.during(phase)
            with self._surroundings(), self._tensors.without_memory(*watching):
                yield
        finally:
            if enabled:
                gc.enable()

    @contextlib.contextmanager
    def _microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Enter and leave what an adapter has around a microbatch, as the phase "around"."""
        with contextlib.ExitStack() as stack:
            with self._during("around"):
                stack.enter_context(self.adapter.microbatch(is_last=is_last))
            leave = stack.pop_all()
        try:
            yield
        finally:
            with self._during("around"):
                leave.close()

    def _mark(self) -> None:
        """Note which storages hold shards, gradients and optimizer state, where the optimizer finds them."""
        optimizer = self.adapter.optimizer
        held = list(self.adapter.held_parameters().values())
        groups = [] if optimizer is None else optimizer.param_groups
        held += [one for group in groups for one in group["params"]]
        self.ledger.mark((one.detach() for one in held), Kind.SHARDS)
        self.ledger.mark((one.grad for one in held if one.grad is not None), Kind.GRADIENTS)
        if optimizer is not None:
            self.ledger.mark(tensors_of(list(optimizer.state.values())), Kind.OPTIMIZER)


def _layout(tensor: torch.Tensor) -> LocalTensorMeta:
    local = local_of(tensor)
    return LocalTensorMeta(tuple(local.shape), str(local.dtype).removeprefix("torch."))


# Which implementations can be simulated: each is tried on a small model in a world of two ranks.


#: The most characters of an error that are shown.
_MOST = 200

_reasons: dict[type[Adapter], str | None] = {}


def why_not(implementation: type[Adapter]) -> str | None:
    """Return why an implementation cannot be simulated, in one line, or None if it can.

    It shards and trains two layers for two steps, without anything that a case may vary. What fails there fails
    because values do not exist, or because other ranks do not. The answer is kept for this process.

    Raises:
        Exception: torch lacks a private name that simulation needs, which is not the implementation's fault.
    """
    if implementation not in _reasons:
        _reasons[implementation] = _try(implementation)
    return _reasons[implementation]


def _try(implementation: type[Adapter]) -> str | None:
    try:
        with simulated_world(2, rank=1) as world:
            one = Simulation(world, implementation, _layers, config=Config(mesh=world.mesh()), optimizer=optim.sgd())
            for _ in range(2):
                one.step(lambda: (torch.zeros(2, 4),), loss=torch.mean)
            one.close()
    except Exception as error:
        if private.complaint_of(error):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}"[:_MOST]
    return None


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
