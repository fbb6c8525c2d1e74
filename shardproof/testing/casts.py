"""A baseline for low precision: full copies on every rank, with the casts of the configuration written out.

The float64 oracle makes no casts. This baseline makes each cast where the contract has it, or where it leaves a choice,
where the adapter's traits have it. So a model whose arithmetic is the same in every order (``models.mixed``) trains to
the same bits.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import Config, OptimizerFactory, Precision, Trainee, Traits, tensors_of_state
from shardproof.harness.judging.elements import exact_difference
from shardproof.harness.judging.finding import Finding, Location, Stage, raise_first, step_label
from shardproof.harness.models.plain import mean_square
from shardproof.harness.parity.divergences import Exact
from shardproof.harness.parity.protocol import cut
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.rank_state import Member
from shardproof.harness.parity.run import Loss, Run, StepPicture
from shardproof.harness.tensors.pieces import Piece, whole
from shardproof.harness.tensors.trees import map_tensors, on_host, tensors_of
from shardproof.harness.watching import capture
from shardproof.harness.watching.capture import Capture, as_inputs
from shardproof.harness.watching.observation import Observed

_Gradients = dict[str, torch.Tensor | None]

#: With what a run is compared here.
_SAME_CASTS = "a baseline with the same casts"


class CastReplica:
    """Trains a full copy of a model on each data-parallel rank.

    Every rank must make the same calls, because the gradients of all ranks are exchanged.

    Args:
        model: float32 and plain, equal on all ranks; it is copied.
        optimizer: updates the float32 parameters.
        traits: those of the implementation, which decide how often a gradient is rounded.
        after_backward: as for ``RunOptions``, and so is ``step``.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        *,
        config: Config,
        optimizer: OptimizerFactory,
        traits: Traits,
        after_backward: Callable[[Trainee], None] | None = None,
        step: Callable[[Trainee], None] | None = None,
    ) -> None:
        self._member = member
        self._config, self._traits = config, traits
        self.model = copy.deepcopy(model).to(member.device)
        self.optimizer = optimizer(self.model.parameters())
        self._after_backward, self._step = after_backward, step
        self._units = {name: unit[0] for unit in config.units for name in unit}
        self._captured: list[Observed] = []

    def take_captured(self) -> list[Observed]:
        """Return what the copies have computed since the last call, with capture on."""
        captured, self._captured = self._captured, []
        return captured

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """Return the full parameters, by name."""
        return dict(self.model.named_parameters())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name, in the dtypes that they have in a forward of now."""
        found = dict(self.model.named_buffers())
        for name, buffer in found.items():
            if buffer.is_floating_point():
                found[name] = buffer.to(self._precision_of(name).buffer_dtype or buffer.dtype)
        return found

    def step(self, microbatches: Sequence[Any], *, loss: Loss = mean_square) -> StepPicture:
        """Train one step and return it, as full tensors (collective)."""
        kept: list[_Gradients] = []
        outputs, losses = [], []
        for index, arguments in enumerate(microbatches):
            output, value, gradients = self._backward(arguments, loss, index)
            outputs.append([tensor.detach() for tensor in tensors_of(output)])
            losses.append(value.detach())
            kept.append(gradients)
        for name, parameter in self.model.named_parameters():
            _set_gradient(parameter, self._reduced(name, [gradients[name] for gradients in kept]))
        if self._after_backward is not None:
            self._after_backward(self)
        averaged = {name: _copied(parameter.grad) for name, parameter in self.model.named_parameters()}
        if self._step is None:
            self.optimizer.step()
        else:
            self._step(self)
        self.optimizer.zero_grad()
        parameters = {name: _copied(parameter) for name, parameter in self.model.named_parameters()}
        state = {
            name: {key: whole(value.clone()) for key, value in tensors_of_state(self.optimizer.state[one]).items()}
            for name, one in self.model.named_parameters()
        }
        captured = self.take_captured()
        return StepPicture(outputs, losses, averaged, None, None, parameters, state, captured=captured)

    def _unit_of(self, name: str) -> str:
        """The first module of the unit of a module or parameter; "" is the root's own."""
        while name and name not in self._units:
            name = name.rpartition(".")[0]
        return self._units.get(name, "")

    def _precision_of(self, name: str) -> Precision:
        precision = self._config.precision_of(self._unit_of(name))
        return Precision() if precision.full_precision_in_eval and not self.model.training else precision

    def _backward(self, arguments: Any, loss: Loss, index: int) -> tuple[Any, torch.Tensor, _Gradients]:
        """Run one microbatch on a copy with all casts made; the gradients are of the dtypes that they are kept in."""
        working, inputs = self._working_copy(), as_inputs(arguments)
        copies = self._capture(working)
        with capture.during(copies, "forward", index):
            output = working(*inputs.args, **inputs.kwargs)
            value = loss(output)
        with capture.during(copies, "backward", index):
            value.backward()
        self._captured += capture.taken(copies)
        for (_, buffer), (_, after) in zip(self.model.named_buffers(), working.named_buffers(), strict=True):
            buffer.copy_(after)
        return output, value, {name: parameter.grad for name, parameter in working.named_parameters()}

    def evaluate(self, arguments: Any) -> list[torch.Tensor]:
        """Run one forward without autograd, in the mode of :attr:`model`, and return the tensors of its output."""
        inputs, working = as_inputs(arguments), self._working_copy()
        copies = self._capture(working)
        with torch.no_grad(), capture.during(copies, "forward", 0):
            outputs = [*tensors_of(working(*inputs.args, **inputs.kwargs))]
        self._captured += capture.taken(copies)
        return outputs

    def _capture(self, working: nn.Module) -> Capture | None:
        return None if self._member.explainer is None else capture.capture_of(working)

    def _working_copy(self) -> nn.Module:
        working = copy.deepcopy(self.model)
        for name, parameter in working.named_parameters():
            if name not in self._config.ignored_params:
                own = self._config.parameter_dtypes.get(name)
                parameter.data = parameter.data.to(own or self._precision_of(name).param_dtype or parameter.dtype)
                if self._traits.keeps_computed_gradients:
                    parameter.grad_dtype = None  # any
        for (_, buffer), cast in zip(working.named_buffers(), self.buffers().values(), strict=True):
            buffer.data = cast.clone()
        for name in ("", *self._units):
            _cast_at_the_border(working.get_submodule(name), self._precision_of(name))
        return working

    def _reduced(self, name: str, microbatches: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient that the optimizer gets, from those of this rank's microbatches (collective)."""
        own = [gradient for gradient in microbatches if gradient is not None]
        parameter = self.model.get_parameter(name)
        if self._config.ranks_differ and not own and parameter.requires_grad:
            own = [torch.zeros_like(parameter, dtype=self._precision_of(name).param_dtype)]
        if name in self._config.ignored_params:
            return _added(own) if own else None
        precision = self._precision_of(name)
        dtype, keeps = precision.reduced_in(parameter.dtype, self._traits), precision.keep_low_precision_grads
        found = [gradient.to(dtype) for gradient in own]
        how = self._config.accumulation
        if found and how is not None and how.skips == "reduction":
            # The sum is of the dtype of the reduction. What is added to it may be of a wider one.
            added = found if self._traits.rounds_microbatches else own
            found = [functools.reduce(torch.Tensor.add_, added[1:], found[0].clone())]
        everyone = self._member.exchange_tensors(found)
        rows = self._config.mesh.mesh.reshape(-1, self._config.shard_size).tolist()
        # First over the ranks that divide a unit, then over the replicas.
        sums = [[_added([everyone[rank][index] for rank in row]) for index in range(len(found))] for row in rows]
        if how is not None and how.skips == "all-reduce":
            sums = [[_added(of_row)] if of_row else [] for of_row in sums]
        count = self._config.gradient_divide_factors.get(self._unit_of(name), len(self._config.data_ranks))
        averages = [_added(list(of_rows)) / count for of_rows in zip(*sums, strict=True)]
        return _added([one if keeps else one.float() for one in averages]) if averages else None


def _set_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    if gradient is None or gradient.dtype == parameter.dtype:
        parameter.grad = gradient
        return
    # What is assigned to ``grad`` must have the parameter's dtype, its data need not.
    parameter.grad = torch.empty_like(parameter)
    parameter.grad.data = gradient


def _copied(tensor: torch.Tensor | None) -> Piece | None:
    return None if tensor is None else whole(tensor.detach().clone())


def _cast_at_the_border(module: nn.Module, precision: Precision) -> None:
    """Cast the inputs and outputs of a module."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), precision.param_dtype) if precision.cast_forward_inputs else (args, kwargs)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, precision.output_dtype)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of a container; None casts nothing."""
    return value if dtype is None else map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, value)


def _added(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, tensors)


def run_and_replica(
    rank: Rank, model: nn.Module, *, optimizer: OptimizerFactory, **options: Any
) -> tuple[Run, CastReplica]:
    """The implementation alone and the baseline with its casts, from the same values (collective).

    The arguments are those of :meth:`Rank.run`; both have ``after_backward`` and ``step``.
    """
    plain = copy.deepcopy(model)
    run = rank.run(model, optimizer=optimizer, **options)
    script = {name: options[name] for name in ("after_backward", "step") if name in options}
    traits = run.adapter.traits
    return run, CastReplica(rank, plain, config=run.adapter.config, optimizer=optimizer, traits=traits, **script)


def step_and_check(
    member: Member,
    run: Run,
    replica: CastReplica,
    batch: Sequence[Any],
    *,
    number: int,
    loss: Loss = torch.sum,
    set_to_none: bool = True,
) -> None:
    """Train step ``number`` of both and compare as :func:`check_equal` does (collective)."""
    expected = replica.step(batch, loss=loss)
    check_equal(member, run, run.step(batch, loss=loss, set_to_none=set_to_none), expected, number=number)


def check_evaluation(member: Member, run: Run, replica: CastReplica, arguments: Any, *, number: int) -> None:
    """Evaluate both before step ``number``, and compare the bits and the dtypes of the outputs (collective).

    Raises:
        Divergence: on every rank, at the first tensor that differs.
    """
    pairs = [*zip(run.evaluate(arguments), replica.evaluate(arguments), strict=True)]

    def findings() -> Iterator[Finding]:
        for index, (mine, other) in enumerate(pairs):
            name = f"evaluation, tensor {index}"
            for stage, _, text in _difference(Stage.OUTPUT, name, whole(mine), whole(other)):
                yield Finding(Location(stage=stage, step=number, rank=member.index, name=name), text)

    if member.explainer is not None:
        mine, other = on_host((capture.taken(run.capture), replica.take_captured()))
        member.explainer.add(Exact(_SAME_CASTS, mine, other, findings, rank=member.index, step=number))
    member.agree(next(findings(), None), title=f"an evaluation diverges from {_SAME_CASTS}")


def check_buffers(run: Run, replica: CastReplica, when: str) -> None:
    """Check that the modules hold the buffers of the baseline, bit for bit, in the dtypes that they train in."""
    for name, expected in replica.buffers().items():
        module, _, key = name.rpartition(".")
        found = run.original_module(module).get_buffer(key)
        assert found.shape == expected.shape, f"{when} {name!r} has shape {tuple(found.shape)}"
        assert found.dtype == expected.dtype, f"{when} {name!r} is of {found.dtype}, not {expected.dtype}"
        difference = exact_difference(found.double(), expected.double())
        assert difference is None, f"{when} {name!r}: element, buffer and the baseline's: {difference}"


def check_statistics(
    member: Member, run: Run, replica: CastReplica, training: Any, evaluation: Any, *, number: int, loss: Loss
) -> None:
    """Train step ``number`` on ``training``, evaluate ``evaluation``, and compare both, and all buffers after each.

    The call is collective.
    """
    step_and_check(member, run, replica, [training], number=number, loss=loss)
    check_buffers(run, replica, f"after {step_label(number)}")
    for module in (run.adapter.module, replica.model):
        module.eval()
    check_evaluation(member, run, replica, evaluation, number=number + 1)
    check_buffers(run, replica, f"after the evaluation that follows {step_label(number)}")
    for module in (run.adapter.module, replica.model):
        module.train()


def check_equal(member: Member, run: Run, step: StepPicture, expected: StepPicture, *, number: int) -> None:
    """Check that step ``number`` has the bits and the dtypes of the baseline's step (collective).

    Raises:
        Divergence: on every rank, at the first tensor that differs, by stage; or if the pieces do not cover the model.
    """
    step, expected = run.settle(step), on_host(expected)

    def findings() -> Iterator[Finding]:
        for stage, name, text in _differences(step, expected):
            yield Finding(Location(stage=stage, step=number, rank=member.index, name=name), text)

    if member.explainer is not None:
        seen = Exact(_SAME_CASTS, step.captured, expected.captured, findings, rank=member.index, step=number)
        member.explainer.add(seen)
    everyone = member.exchange((next(findings(), None), step.show(step=number)))
    raise_first([found for found, _ in everyone], title=f"the sharded run diverges from {_SAME_CASTS}")
    run.coverage.judge([shown for _, shown in everyone])


def _differences(step: StepPicture, expected: StepPicture) -> Iterator[tuple[Stage, str, str]]:
    for number, (outputs, others) in enumerate(zip(step.outputs, expected.outputs, strict=True)):
        for index, (mine, other) in enumerate(zip(outputs, others, strict=True)):
            yield from _difference(Stage.OUTPUT, f"microbatch {number}, tensor {index}", whole(mine), whole(other))
    held = {name for name, piece in step.parameters.items() if piece is not None and piece.tensor.numel()}
    for name, piece in step.gradients.items():
        # A rank that holds no element of a parameter may have no gradient and no state of it.
        if piece is not None or name in held:
            yield from _difference(Stage.GRADIENT, name, piece, expected.gradients[name])
    for name, piece in step.parameters.items():
        yield from _difference(Stage.PARAMETER, name, piece, expected.parameters[name])
    for name, state in (step.state or {}).items():
        assert expected.state is not None
        if name in held and (missing := expected.state[name].keys() - state.keys()):
            yield Stage.OPTIMIZER_STATE, name, f"lacks {', '.join(sorted(missing))}"
        for key, piece in state.items():
            yield from _difference(Stage.OPTIMIZER_STATE, f"{name}: {key}", piece, expected.state[name].get(key))


def _difference(stage: Stage, name: str, mine: Piece | None, full: Piece | None) -> Iterator[tuple[Stage, str, str]]:
    if mine is None or full is None:
        if mine is not full:
            yield stage, name, f"only the {'baseline' if mine is None else 'sharded run'} has one"
        return
    other = cut(mine, full.tensor, name)
    if mine.tensor.dtype != other.dtype:
        yield stage, name, f"has dtype {mine.tensor.dtype}; the baseline has {other.dtype}"
    elif found := exact_difference(mine.tensor, other):
        index, one, right = found
        yield stage, name, f"element {list(index)} of this rank's part is {one!r}; the baseline has {right!r}"
