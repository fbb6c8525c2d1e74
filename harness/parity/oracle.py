"""The oracle: a float64 replay of a training step in one process, without sharding."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import Clip, OptimizerFactory
from shardproof.harness.tensors import notes
from shardproof.harness.tensors.trees import map_tensors
from shardproof.harness.watching import capture
from shardproof.harness.watching.capture import Capture, as_inputs
from shardproof.harness.watching.observation import Observed


@dataclasses.dataclass
class OracleStep:
    """The results of one step of the oracle, as full float64 tensors. An evaluation has outputs alone.

    Gradients and parameters are keyed by parameter name. The gradient of an unused parameter is None.
    """

    outputs: list[list[Any]]  # the forward outputs, indexed ``[rank][microbatch]`` by data-parallel rank
    # The scalar losses, indexed the same way.
    losses: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    # Each data-parallel rank's gradients, summed over its microbatches, before the average.
    own_gradients: list[dict[str, torch.Tensor | None]] = dataclasses.field(default_factory=list)
    # The same by rank and microbatch, where one loss is of the whole batch: each one's share of its gradient.
    shares: list[list[dict[str, torch.Tensor | None]]] = dataclasses.field(default_factory=list)
    # The average of ``own_gradients`` over the ranks, added to what the last ``zero_grad`` left: after
    # ``set_to_none=False``, an unused parameter that has been used before has zeros here.
    gradients: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    norm: torch.Tensor | None = None  # the total norm of ``gradients``, or None without clipping
    # The gradients after clipping; equal to ``gradients`` without clipping.
    clipped: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    # The tensors of the optimizer's state after the step, by parameter and key.
    state: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    # What the modules computed, in order, by data-parallel rank; empty unless the case runs with capture on.
    captured: Sequence[Sequence[Observed]] = ()


class Oracle:
    """Trains a float64 copy of the model in one process; without an optimizer parameters stay as they are.

    In float32 it is a baseline, with the rounding errors of one process, for cases that no baseline of several fits.

    Each step replays the microbatches of every data-parallel rank one by one, averages the gradients over the ranks,
    clips, and steps the optimizer. With ``global_loss`` the outputs of all of them are one batch, which has one loss.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory | None,
        clip: Clip | None,
        captures: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self._dtype = dtype
        self.capture: Capture | None = capture.capture_of(self.model) if captures else None
        with notes.during("comparing"):
            self.optimizer = optimizer(self.model.parameters()) if optimizer else None
        self.clip = clip
        self._names = dict(self.model.named_parameters())

    def step(
        self,
        batches: Sequence[Sequence[Any]],
        *,
        loss: Callable[[Any], torch.Tensor],
        submodule: str = "",
        set_to_none: bool = True,
        global_loss: Callable[..., torch.Tensor] | None = None,
    ) -> OracleStep:
        """Train one step on the arguments of each forward, indexed ``[rank][microbatch]`` by data-parallel rank.

        They are as :func:`as_inputs` takes them; floating-point tensors are converted to the oracle's dtype.
        """
        module = self.model.get_submodule(submodule)
        outputs: list[list[Any]] = []
        losses: list[list[torch.Tensor]] = []
        own: list[dict[str, torch.Tensor | None]] = []
        captured: list[Sequence[Observed]] = []
        shares: list[list[dict[str, torch.Tensor | None]]] = []
        loss_of = self._in_whole_batch(batches, global_loss, submodule) if global_loss else None
        for microbatches in batches:
            outputs.append([])
            losses.append([])
            own.append(dict.fromkeys(self._names))
            shares.append([])
            for index, arguments in enumerate(microbatches):
                inputs = map_tensors(self._converted, as_inputs(arguments))
                with notes.during("comparing"), capture.during(self.capture, "forward", index):
                    output = module(*inputs.args, **inputs.kwargs)
                    value = loss_of(output) if loss_of else loss(output, *inputs.labels)
                outputs[-1].append(map_tensors(torch.Tensor.detach, output))
                losses[-1].append(value.detach() / (len(batches) * len(microbatches) if loss_of else 1))  # add up to it
                with notes.during("comparing"), capture.during(self.capture, "backward", index):
                    gradients = self._gradients_of(value)
                own[-1] = {name: _sum(before, gradients[name]) for name, before in own[-1].items()}
                if loss_of:
                    shares[-1].append(gradients)
            captured.append(capture.taken(self.capture))
        average = {name: _average([one[name] for one in own]) for name in self._names}
        # Added to what `zero_grad` left in `.grad`, as backward does.
        for name, value in self._names.items():
            value.grad = _sum(value.grad, average[name])
        gradients = self._picture()
        norm, clipped = self._clipped(gradients)
        if self.optimizer is not None:
            self.optimizer.step()
        parameters = {name: value.detach().clone() for name, value in self._names.items()}
        self.model.zero_grad(set_to_none=set_to_none)
        return OracleStep(outputs, losses, own, shares, gradients, norm, clipped, parameters, self._state(), captured)

    def _in_whole_batch(
        self, batches: Sequence[Sequence[Any]], loss: Callable[..., torch.Tensor], submodule: str
    ) -> Callable[[Any], torch.Tensor]:
        """Return the loss of the whole batch as a function of the output of each microbatch in turn.

        The outputs of the others are constants in it, so that its gradient is the share of one microbatch in that of
        the whole. A rank's own gradient is averaged over the ranks, so the loss is multiplied by their number.
        """
        inputs = [map_tensors(self._converted, as_inputs(one)) for mine in batches for one in mine]
        with notes.during("comparing"), torch.no_grad():
            outputs = [self.model.get_submodule(submodule)(*one.args, **one.kwargs) for one in inputs]
        labels = [torch.cat(parts) for parts in zip(*(one.labels for one in inputs), strict=True)]
        places = itertools.count()

        def loss_of(output: torch.Tensor) -> torch.Tensor:
            place = next(places)
            return loss(torch.cat([*outputs[:place], output, *outputs[place + 1 :]]), *labels) * len(batches)

        return loss_of

    @torch.no_grad()
    def evaluate(self, inputs: Any, *, submodule: str = "", mode: str = "no_grad") -> Any:
        """Run one forward of this rank's inputs without autograd, whatever the ``mode``, and return its output."""
        converted = map_tensors(self._converted, as_inputs(inputs))
        with notes.during("comparing"), capture.during(self.capture, "forward", 0):
            return self.model.get_submodule(submodule)(*converted.args, **converted.kwargs)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        state = {} if self.optimizer is None else self.optimizer.state
        return {
            name: {
                key: one.detach().clone() for key, one in state.get(value, {}).items() if isinstance(one, torch.Tensor)
            }
            for name, value in self._names.items()
        }

    def _gradients_of(self, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
        trained = {name: value for name, value in self._names.items() if value.requires_grad}
        new = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return dict.fromkeys(self._names) | dict(zip(trained, new, strict=True))

    def _picture(self) -> dict[str, torch.Tensor | None]:
        return {name: None if value.grad is None else value.grad.clone() for name, value in self._names.items()}

    def _clipped(
        self, gradients: dict[str, torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
        if self.clip is None:
            return None, gradients
        present = [value.grad for value in self._names.values() if value.grad is not None]
        norm = total_norm(present, self.clip.norm_type)
        # The documented formula of torch's clip_grad_norm_: scale by max_norm / (norm + 1e-6), but never up.
        factor = min(1.0, self.clip.max_norm / (float(norm) + 1e-6))
        for gradient in present:
            gradient.mul_(factor)
        return norm, self._picture()


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The p-norm over all elements of all gradients, (sum |g|^p)^(1/p), or max |g| for p = inf: a float64 scalar."""
    flat = torch.cat([gradient.flatten().double() for gradient in gradients] or [torch.zeros(0)])
    return torch.linalg.vector_norm(flat, norm_type) if flat.numel() else flat.new_zeros(())


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _average(gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The mean over all ranks, or None if no rank has a gradient; a rank without one contributes zeros."""
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) / len(gradients) if present else None
