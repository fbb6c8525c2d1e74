"""Trains one model with one adapter on one rank, and copies the results of each stage as they appear."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory
from shardproof.harness.adapters.config import EvaluationMode
from shardproof.harness.collectives.delays import Delay, Perturbation
from shardproof.harness.collectives.recorder import Recorder
from shardproof.harness.collectives.trace import Collective, Trace, gathered_in
from shardproof.harness.collectives.units import UnitLookup, UnitSize, units_of
from shardproof.harness.judging.finding import Divergence, Finding, Location, Stage
from shardproof.harness.parity import course, coverage, protocol
from shardproof.harness.parity.course import Course
from shardproof.harness.parity.coverage import Coverage, Shown
from shardproof.harness.parity.protocol import Tie, ties_of
from shardproof.harness.parity.rank_state import Member
from shardproof.harness.tensors import devices, memory, notes
from shardproof.harness.tensors.pieces import Piece, original_name
from shardproof.harness.tensors.trees import map_tensors, on_host, tensors_of
from shardproof.harness.watching import capture
from shardproof.harness.watching.capture import Capture, Inputs, as_inputs
from shardproof.harness.watching.observation import Observed

# Copies of tensors that are taken while a step runs, into memory that was reserved before the step.
#
# A copy is work on the current stream, where a training script would read the tensor. It makes neither the host nor
# another stream wait, and after the first step it allocates nothing, so that the allocator hands the implementation the
# same memory with and without copies.

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class Snapshots:
    """Copies the tensors of one step after another; each copy belongs to the caller and is never written again."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._reserved: dict[Hashable, torch.Tensor] = {}

    def reserve(self) -> None:
        """Allocate memory for the tensors that the last step copied; call it before a step."""
        for key, (shape, dtype, device) in self._kinds.items():
            if key not in self._reserved:
                self._reserved[key] = torch.empty(shape, dtype=dtype, device=device)

    @torch.no_grad()
    def copy(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return a detached copy of a tensor, in reserved memory where the tensor is like that of the last step.

        The key tells the tensors of one step apart. A subclass such as DTensor is cloned as it is.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor.detach().clone()
        kind = tensor.shape, tensor.dtype, tensor.device
        reserved = self._reserved.pop(key, None)
        self._kinds[key] = kind
        if reserved is None or (reserved.shape, reserved.dtype, reserved.device) != kind:
            return tensor.detach().clone()
        return reserved.copy_(tensor)


Loss = Callable[..., torch.Tensor]
"""Maps a forward's output, and the labels of its inputs, to a scalar."""

Pieces = dict[str, Piece | None]
"""The local shards of one rank, by parameter names of the original model; None for a missing gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to drive a run. How to shard its model is in ``Config``.

    Attributes:
        optimizer: a factory of ``harness.models.optim``; None trains without an optimizer.
        delays: delays to inject around collectives, between forward and backward, or around the optimizer step.
        prepare: changes the model before it is sharded (tensor parallelism, recomputation, compilation) and returns
            it or its replacement. Parameters keep their names, except for the prefix of a wrapper.
        is_traced: whether a dispatch mode records collectives. It must be False for ``torch.compile``, which compiles
            nothing under a dispatch mode; then those are recorded that the methods of ``ProcessGroup`` issue.
        pictures: whether gradients, parameters and optimizer state are copied in every step. Without, only outputs and
            losses are, for cases about memory.
        must_clip: whether the total norm must exceed the norm to which gradients are clipped; False expects the
            contrary, and None allows both.
        after_backward: called with the adapter between the last backward and the optimizer step, as a training script
            may change gradients there; it may communicate.
        step: called with the adapter instead of its own step, as where user code scales the loss.
        compared_as: the dtype to which floating-point tensors are rounded before they are compared, those of the
            baseline too. A model in float64 that is compared as float32 has no rounding errors that count, however ill
            its sums are conditioned. None compares them as they are.
    """

    optimizer: OptimizerFactory | None = None
    delays: Sequence[Delay] = ()
    prepare: Callable[[nn.Module], nn.Module] | None = None
    is_traced: bool = True
    pictures: bool = True
    must_clip: bool | None = True
    after_backward: Callable[[Adapter], None] | None = None
    step: Callable[[Adapter], None] | None = None
    compared_as: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.is_traced and any(one.at == "collective" and one.when == "after" for one in self.delays):
            raise ValueError("delays after a collective need is_traced=True: without, only its beginning is seen")


@dataclasses.dataclass
class StepPicture:
    """The results of one step on one rank: copies, so that later steps cannot change them."""

    outputs: list[list[torch.Tensor]]  # the tensors of each microbatch's forward output
    losses: list[torch.Tensor]
    gradients: Pieces  # local shards of the gradients after the last backward, before clipping
    # The total norm as the adapter returned it, which may be a DTensor until :meth:`Run.settle`; None without clipping,
    # or if the adapter cannot return it.
    norm: torch.Tensor | None
    # Local shards of the gradients after clipping; None unless clipping is a call between backward and the optimizer
    # step.
    clipped: Pieces | None
    parameters: Pieces  # local shards of the parameters after the optimizer step
    # Local shards of the optimizer state after the step, by parameter and key; None if the adapter cannot return it.
    state: dict[str, dict[str, Piece]] | None = None
    gradient_numel: int | None = None  # the elements that the rank held of the gradients of its registered parameters
    # Checks that the shards of all ranks cover the model; None for pictures that no run took.
    coverage: Coverage | None = None
    captured: Sequence[Observed] = ()  # what the modules computed, in order; empty unless the case runs with capture on

    def show(self, *, step: int) -> Shown:
        """Return what this rank holds of the tensors that the run has not shown before."""
        assert self.coverage is not None, "only pictures of a run show anything"
        stages = (
            (Stage.GRADIENT, self.gradients), (Stage.CLIPPED_GRADIENT, self.clipped), (Stage.PARAMETER, self.parameters)
        )  # fmt: skip
        return self.coverage.show(stages, step=step)


class Phases:
    """Records the collectives of a run by phase, injects its delays, and notes the calls that issue them.

    Attributes:
        recorder: records the collectives.
        perturbation: injects the delays.
        course: the calls of the training so far, for the text of an exception.
    """

    def __init__(
        self, member: Member, units: Sequence[UnitSize], *, name: str, device_type: str, options: RunOptions
    ) -> None:
        self._lookup, self._announcer, self._is_traced = UnitLookup(units), member.announcer, options.is_traced
        self.recorder = Recorder(self._lookup, announcer=member.announcer)
        self.perturbation = Perturbation(options.delays, rank=member.index, device_type=device_type)
        self.perturbation.install(self.recorder)
        self.course = Course(name)
        self.course.look = self._gathered
        self._step_starts: list[int] = []

    def begin_step(self) -> None:
        """Note that a further step begins, whose collectives the next ones are."""
        self._step_starts.append(len(self.recorder.trace))

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the collectives of a phase, by whichever means the options allow."""
        # The recorder is a dispatch mode, under which torch.compile compiles nothing.
        traced = self._is_traced
        recorded = self.recorder.during(phase) if traced else self._announcer.heard_by(self._hear, phase=phase)
        with self.course.during(phase), recorded:
            yield

    def _hear(self, collective: Collective) -> None:
        unit = self._lookup(collective.kind, collective.dtype, collective.nbytes)
        self.recorder.trace.append(dataclasses.replace(collective, unit=unit))
        self.perturbation.around("before", collective)

    def _gathered(self) -> str:
        """Say what the forward of a later step has gathered so far, and what that of the first step did."""
        starts, trace = self._step_starts, self.recorder.trace
        if len(starts) < 2:
            return ""
        first, this = (gathered_in(trace[start:end]) for start, end in ((0, starts[1]), (starts[-1], None)))
        if this == first:
            return ""
        told = ", ".join(this) or "nothing"
        return f"gathered in this forward so far: {told}; in that of the first step: {', '.join(first) or 'nothing'}"


class StepPeak:
    """Measures the most memory that a step allocates on a device that counts it, for the record of the case."""

    def __init__(self, member: Member, *, is_measured: bool) -> None:
        self._device, self._record, self._held = member.device, member.record, 0
        self._is_measured = is_measured and devices.counts_memory(member.device)

    def begin(self) -> None:
        """Begin a step."""
        if self._is_measured:
            self._held = memory.begin_step_peak(self._device)

    def end(self) -> None:
        """Record the peak of the step."""
        if self._is_measured:
            self._record.add_peak(memory.step_peak(self._device) - self._held)


class Run:
    """Drives an adapter through training steps and records its collectives by phase.

    Args:
        member: this rank.
        implementation: the adapter class to drive.
        model: float32, on this rank's device, equal on all ranks; from here on it belongs to the adapter.
        config: how to shard the model.
        options: how to drive the adapter.

    Attributes:
        units: the units of the model, the root's own last.
        recorder: records the collectives.
        perturbation: injects the delays.
        coverage: what the run has shown of its pieces, and how large they may be.
        foreign: returns the addresses of storages in which no piece may lie, those of the baseline and the oracle.
        adapter: the adapter, with the sharded model.
        untied: the parameters that modules of the model share and those of the sharded one do not.
        suspicion: a failure that the first forward raises unless the implementation raises an error of its own.
        capture: copies what the modules compute; None unless the case runs with capture on.
        course: the calls of the training so far, for the text of an exception.
    """

    def __init__(
        self, member: Member, implementation: type[Adapter], model: nn.Module, *, config: Config, options: RunOptions
    ) -> None:
        self._options = options
        self._snapshots = Snapshots()
        self.units: list[UnitSize] = units_of(
            model, config.units, traits=implementation.traits, size=config.shard_size, ignored=config.ignored_params
        )
        self._phases = Phases(
            member, self.units, name=implementation.name, device_type=config.mesh.device_type, options=options
        )
        self.recorder, self.perturbation = self._phases.recorder, self._phases.perturbation
        self.course = self._phases.course
        self.coverage = Coverage(model, config=config, traits=implementation.traits, rank=member.index)
        self.foreign: Callable[[], set[int]] = set
        prepared = options.prepare(model) if options.prepare else model
        self.coverage.note_tensor_parallel(prepared)
        # An implementation keeps these modules, whatever it puts around them or makes of their classes.
        every_name = prepared.named_modules(remove_duplicate=False)
        self._modules: dict[str, nn.Module] = {original_name(name): module for name, module in every_name}
        ties, names = ties_of(prepared), capture.names_of(prepared)
        self.adapter = protocol.make(implementation, prepared, optimizer=options.optimizer, config=config)
        course.follow(self.adapter, self.course)
        member.courses.append(self.course)
        self.untied: list[Tie] = [tie for tie in ties if not tie.is_kept(self._modules)]
        self.suspicion: Divergence | None = None
        self.capture: Capture | None = None
        self._peak = StepPeak(member, is_measured=implementation is member.implementation)
        # Hooks of modules would break the graphs of compiled ones, and a case about memory would see the copies.
        if member.explainer is not None and options.is_traced and options.pictures:
            self.capture = Capture(self._modules, names, divides=self._factor)
            member.explainer.watch(self.capture, implementation)

    @property
    def _factor(self) -> int:
        """By what the loss of a microbatch is multiplied before backward."""
        # All other implementations sum gradients over microbatches. One that averages them gets a scaled loss, so that
        # its gradients are the same sums.
        return self.adapter.config.microbatches if self.adapter.traits.divides_by_microbatches else 1

    @property
    def runs(self) -> tuple["Run", ...]:
        """This run alone, where a ``Pair`` has two."""
        return (self,)

    @property
    def trace(self) -> Trace:
        """The collectives issued so far, without those that shard the model or copy results."""
        return self.recorder.trace

    def step(
        self,
        microbatches: Sequence[Inputs | tuple[Any, ...]],
        *,
        loss: Loss,
        submodule: str = "",
        set_to_none: bool = True,
        ahead: int = 0,
    ) -> StepPicture:
        """Train one optimizer step.

        The host never waits for the device here, so that steps follow each other on its streams as in training.

        Args:
            microbatches: the arguments of each forward.
            loss: maps a forward's output to a scalar.
            submodule: the name of the module to call; "" is the root.
            set_to_none: whether gradients are set to None after the step, or to zeros.
            ahead: the number of forwards that run before the first backward, as in a pipeline.
        """
        self._snapshots.reserve()
        self._phases.begin_step()
        self._peak.begin()
        adapter, clip = self.adapter, self.adapter.config.clip
        if ahead:
            outputs, losses = self._interleaved(microbatches, loss=loss, submodule=submodule, ahead=ahead)
        else:
            outputs, losses = self._one_by_one(microbatches, loss=loss, submodule=submodule)
        if self._options.after_backward is not None:
            self._options.after_backward(adapter)
        gradients = self._picture(Stage.GRADIENT)
        numel = coverage.gradient_numel(adapter)
        norm, clipped = None, None
        if clip is not None and adapter.traits.clips == "call":
            with self._phases.during("clip"):
                norm = adapter.clip()
            norm = self._snapshots.copy(Stage.TOTAL_NORM, norm)
            clipped = self._picture(Stage.CLIPPED_GRADIENT)
        with self._phases.during("step"):
            self.perturbation.at("step", "before")
            if self._options.step is None:
                adapter.step()
            else:
                self._options.step(adapter)
            self.perturbation.at("step", "after")
        if clip is not None and adapter.traits.clips == "step":
            norm = adapter.norm_after_step()
        parameters = self._picture(Stage.PARAMETER)
        state = self._state_picture()
        adapter.zero_grad(set_to_none=set_to_none)
        captured = capture.taken(self.capture)
        self._peak.end()
        notes.tell("stepped")
        return StepPicture(outputs, losses, gradients, norm, clipped, parameters, state, numel, self.coverage, captured)

    def original_module(self, name: str) -> nn.Module:
        """Return a module of the model as it was before sharding, for hooks of the harness and of cases.

        Args:
            name: its name in the original model; "" is the root.
        """
        return self._modules[name]

    def settle(self, picture: StepPicture) -> StepPicture:
        """Return a picture with its tensors on the host and its norm as a plain scalar (collective).

        It communicates and waits for the device, so it is called once the steps that it could disturb are over. The
        comparison of many small tensors on a device would wait for it several times for each.
        """
        norm = picture.norm
        if norm is not None and self.adapter.traits.clips == "call":
            norm = self.adapter.norm_value(norm).detach()
        return cast(StepPicture, on_host(self._rounded(dataclasses.replace(picture, norm=norm))))

    def _rounded(self, value: Any) -> Any:
        """Return a container with its floating-point tensors in the dtype in which they are compared."""
        dtype = self._options.compared_as
        if dtype is None:
            return value
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)

    def _picture(self, stage: Stage) -> Pieces:
        """Ask the adapter for its gradients, or for its parameters after the step, and copy them.

        The copies are sorted by name, because ranks and implementations may register in different orders.
        """
        if not self._options.pictures:
            return {}
        method: Literal["gradients", "parameters"] = "parameters" if stage == Stage.PARAMETER else "gradients"
        pieces = protocol.pieces_of(self.adapter, method, self.coverage.shapes, untied=self.untied)
        self.coverage.note_borrowed(stage, pieces, self.foreign)
        return {
            name: None if piece is None else self._copied((stage, name), piece)
            for name, piece in sorted(pieces.items())
        }

    def _state_picture(self) -> dict[str, dict[str, Piece]] | None:
        state = protocol.state_of(self.adapter, self.coverage.shapes) if self._options.pictures else None
        if state is None:
            return None
        return {
            name: {
                key: self._copied((Stage.OPTIMIZER_STATE, name, key), piece) for key, piece in sorted(pieces.items())
            }
            for name, pieces in sorted(state.items())
        }

    def _copied(self, key: tuple[object, ...], piece: Piece) -> Piece:
        return dataclasses.replace(piece, tensor=self._snapshots.copy(key, piece.tensor))

    def _one_by_one(self, microbatches: Sequence[Any], *, loss: Loss, submodule: str) -> tuple[Any, Any]:
        outputs, losses = [], []
        for index, arguments in enumerate(microbatches):
            with self.adapter.microbatch(is_last=index == len(microbatches) - 1):
                output, value = self._forward(arguments, index, loss=loss, submodule=submodule)
                self._backward(value, index)
            outputs.append(self._output_copies(output, index))
            losses.append(self._snapshots.copy((Stage.LOSS, index), value))
        return outputs, losses

    def _interleaved(self, microbatches: Sequence[Any], *, loss: Loss, submodule: str, ahead: int) -> tuple[Any, Any]:
        """Run microbatches as a pipeline does: ``ahead`` forwards, then forward and backward in turn, then the rest."""
        outputs, losses = [], []
        pending: collections.deque[torch.Tensor] = collections.deque()
        for index in range(len(microbatches) + ahead):
            if index < len(microbatches):
                output, value = self._forward(microbatches[index], index, loss=loss, submodule=submodule)
                outputs.append(self._output_copies(output, index))
                losses.append(self._snapshots.copy((Stage.LOSS, index), value))
                pending.append(value)
            if index >= ahead:
                with self.adapter.microbatch(is_last=len(pending) == 1):
                    self._backward(pending.popleft(), index - ahead)
        return outputs, losses

    def forward_backward(
        self, arguments: Inputs | tuple[Any, ...], *, loss: Loss, submodule: str = ""
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run forward and backward of one microbatch, without an optimizer step.

        Args:
            arguments: the arguments of the forward; a tuple stands for positional ones.
            loss: maps the output to a scalar.
            submodule: the name of the module to call; "" is the root.

        Returns:
            Copies of the output's tensors and of the loss, detached.
        """
        output, value = self._forward(arguments, 0, loss=loss, submodule=submodule)
        self._backward(value, 0)
        return self._output_copies(output, 0), self._snapshots.copy((Stage.LOSS, 0), value)

    def evaluate(
        self, arguments: Inputs | tuple[Any, ...], *, mode: EvaluationMode = "no_grad", submodule: str = ""
    ) -> list[torch.Tensor]:
        """Run one forward without autograd, in the phase "evaluation" of the trace.

        Args:
            arguments: as for :meth:`forward_backward`.
            mode: the context in which the forward runs.
            submodule: the name of the module to call; "" is the root.

        Returns:
            Copies of the output's tensors.
        """
        inputs = as_inputs(arguments)
        context = torch.inference_mode() if mode == "inference_mode" else torch.no_grad()
        phase = self._phases.during("evaluation")
        with notes.during("evaluation"), phase, context, capture.during(self.capture, "forward", 0):
            output = self._called(inputs, submodule)
            copies: list[torch.Tensor] = self._rounded([tensor.detach().clone() for tensor in tensors_of(output)])
        # An inference tensor cannot be compared under autograd.
        return [tensor.clone() for tensor in copies] if mode == "inference_mode" else copies

    def _forward(self, arguments: Any, microbatch: int, *, loss: Loss, submodule: str) -> tuple[Any, torch.Tensor]:
        notes.tell("loss", loss=loss)
        inputs = as_inputs(arguments)
        with self._phases.during("forward"), capture.during(self.capture, "forward", microbatch):
            output = self._called(inputs, submodule)
            return output, loss(output, *inputs.labels)

    def _called(self, inputs: Inputs, submodule: str) -> Any:
        """Return the output of the adapter's forward, or raise the suspicion, on every rank."""
        output = self.adapter.forward(*inputs.args, submodule=submodule, **inputs.kwargs)
        if self.suspicion is not None:
            raise self.suspicion
        return output

    def _backward(self, value: torch.Tensor, microbatch: int) -> None:
        self.perturbation.at("loss")
        factor = self._factor
        with self._phases.during("backward"), capture.during(self.capture, "backward", microbatch):
            self.adapter.backward(value * factor if factor != 1 else value)

    def _output_copies(self, output: Any, microbatch: int) -> list[torch.Tensor]:
        return [
            self._snapshots.copy((Stage.OUTPUT, microbatch, index), tensor)
            for index, tensor in enumerate(tensors_of(output))
        ]


def sharded_run(
    member: Member,
    model: nn.Module,
    *,
    implementation: type[Adapter] | None = None,
    config: Config,
    options: RunOptions,
) -> Run:
    """Create a run of an implementation, by default of that under test (collective).

    If the adapter declares that it shards parameters, the bytes that every rank holds are checked, and a Divergence is
    raised on every rank, if any rank holds more parameter bytes than its share. Where parameters were untied, the first
    forward raises it. The model is float32, equal on all ranks, and belongs to the run from here on.
    """
    implementation = implementation or member.implementation
    traits = implementation.traits
    with member.stopwatch.during("leftovers"):
        before = memory.held_bytes(member.device) - memory.bytes_of(model.parameters())
    with member.stopwatch.during("sharding"):
        run = Run(member, implementation, model, config=config, options=options)
    sizes = run.coverage.sizes
    if "parameters" in traits.shards and sizes.share and config.shard_size > 1:
        with member.stopwatch.during("leftovers"):
            held = memory.settled_bytes(member.device, limit=before + sizes.byte_limit) - before
        counts = coverage.Counts(
            coverage.local_numel(run.adapter.module.parameters()) if sizes.can_tell else None, sizes.numel
        )
        if implementation is member.implementation and not devices.counts_memory(member.device):
            member.record.add_peak(held)
        text = f"holds {held} bytes of parameters after sharding; its share is {sizes.byte_share}"
        finding = None
        if held > sizes.byte_limit:
            text = "\n  ".join([text, *coverage.kept_outside(run.adapter.module)])
            finding = Finding(Location(stage=Stage.SHARDING, rank=member.index), text)
        everyone = member.exchange((counts, finding, run.untied))
        try:
            coverage.check_sharded([(counts, finding) for counts, finding, _ in everyone])
        except Divergence as error:
            untied: list[Tie] = next((ties for _, _, ties in everyone if ties), [])
            if not untied:
                raise
            # What was untied takes more memory. An implementation that does not support ties may say so in the first
            # forward, in words of its own.
            text = "\n  ".join([str(error), *(f"untied: {tie}" for tie in untied)])
            run.suspicion = Divergence(text, error.location)
    return run
