"""One model trained by one adapter on one rank, with a picture of every stage as it happens."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from harness.adapters.base import Adapter, Config, OptimizerFactory, Piece
from harness.collectives import Recorder, Trace
from harness.perturb import Delay, Perturbation
from harness.trees import tensors_of
from harness.units import Unit, UnitLookup, units_of

Batch = tuple[Any, ...]
"""The arguments of one forward."""

Loss = Callable[[Any], torch.Tensor]
"""From a forward's output to a scalar."""

AfterBackward = Callable[[Adapter], None]
"""What a script does to the gradients between the last backward and the step; it may communicate."""

Pieces = dict[str, Piece | None]


@dataclasses.dataclass
class StepPicture:
    """What one rank saw of one step; copies, so that later steps cannot change them.

    ``outputs`` and ``losses`` are per microbatch. ``clipped`` is None where nothing clipped
    between backward and step.
    """

    outputs: list[list[torch.Tensor]]
    losses: list[torch.Tensor]
    gradients: Pieces
    norm: torch.Tensor | None
    clipped: Pieces | None
    parameters: Pieces


class Run:
    """Drives an adapter through training steps, recording collectives by phase."""

    def __init__(
        self,
        adapter: type[Adapter],
        model: nn.Module,
        *,
        optimizer: OptimizerFactory | None,
        config: Config,
        rank: int,
        delays: Sequence[Delay] = (),
        prepare: Callable[[nn.Module], nn.Module] | None = None,
        is_traced: bool = True,
        after_backward: AfterBackward | None = None,
    ) -> None:
        assert is_traced or not delays, "delays are met by the trace"
        self._is_traced = is_traced
        self.units: list[Unit] = units_of(model, config.units, traits=adapter.traits, size=config.shard_size)
        self.recorder = Recorder(UnitLookup(self.units))
        self.perturbation = Perturbation(delays, rank=rank, device_type=config.mesh.device_type)
        self.perturbation.install(self.recorder)
        self.adapter = adapter(prepare(model) if prepare else model, optimizer=optimizer, config=config)
        self._after_backward = after_backward
        self._losses: list[list[torch.Tensor]] = []

    @property
    def trace(self) -> Trace:
        """The collectives issued so far, without those of setting up and of taking pictures."""
        return self.recorder.trace

    @property
    def losses(self) -> list[float]:
        """Each step's loss, summed over its microbatches; waits for the device."""
        return [sum(float(value) for value in losses) for losses in self._losses]

    def step(
        self,
        microbatches: Sequence[Batch],
        *,
        loss: Loss,
        submodule: str = "",
        set_to_none: bool = True,
        ahead: int = 0,
    ) -> StepPicture:
        """Train one optimizer step; ``ahead`` forwards run before the first backward.

        Nothing here waits for the device, so that steps can follow each other on its streams as they do in training.
        """
        adapter, clip = self.adapter, self.adapter.config.clip
        if ahead:
            outputs, losses = self._interleaved(microbatches, loss=loss, submodule=submodule, ahead=ahead)
        else:
            outputs, losses = self._one_by_one(microbatches, loss=loss, submodule=submodule)
        if self._after_backward is not None:
            self._after_backward(adapter)
        gradients = copy_pieces(adapter.gradients())
        norm, clipped = None, None
        if clip is not None and adapter.traits.clips == "call":
            with self._during("clip"):
                returned = adapter.clip()
            norm = adapter.norm_value(returned).detach().clone()
            clipped = copy_pieces(adapter.gradients())
        self._optimize()
        if clip is not None and adapter.traits.clips == "step":
            norm = adapter.norm_after_step()
        parameters = copy_pieces(adapter.parameters())
        adapter.zero_grad(set_to_none=set_to_none)
        self._losses.append(losses)
        return StepPicture(outputs, losses, gradients, norm, clipped, parameters)

    def _one_by_one(self, microbatches: Sequence[Batch], *, loss: Loss, submodule: str) -> tuple[Any, Any]:
        outputs, losses = [], []
        for index, arguments in enumerate(microbatches):
            with self.adapter.microbatch(is_last=index == len(microbatches) - 1):
                output, value = self.forward_backward(arguments, loss=loss, submodule=submodule)
            outputs.append(output)
            losses.append(value)
        return outputs, losses

    def _interleaved(self, microbatches: Sequence[Batch], *, loss: Loss, submodule: str, ahead: int) -> tuple[Any, Any]:
        """As a pipeline does: some forwards, then one backward for each further forward, then what is left."""
        outputs, losses = [], []
        pending: collections.deque[torch.Tensor] = collections.deque()
        for index in range(len(microbatches) + ahead):
            if index < len(microbatches):
                output, value = self._forward(microbatches[index], loss=loss, submodule=submodule)
                outputs.append(_detached(output))
                losses.append(value.detach().clone())
                pending.append(value)
            if index >= ahead:
                with self.adapter.microbatch(is_last=len(pending) == 1):
                    self._backward(pending.popleft())
        return outputs, losses

    def forward_backward(
        self, arguments: Batch, *, loss: Loss, submodule: str = ""
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """One microbatch: the output's tensors and the loss, both detached."""
        output, value = self._forward(arguments, loss=loss, submodule=submodule)
        self._backward(value)
        return _detached(output), value.detach().clone()

    def _forward(self, arguments: Batch, *, loss: Loss, submodule: str) -> tuple[Any, torch.Tensor]:
        with self._during("forward"):
            output = self.adapter.forward(*arguments, submodule=submodule)
            return output, loss(output)

    def _backward(self, value: torch.Tensor) -> None:
        self.perturbation.at("loss")
        # An engine that averages over microbatches is asked for the sum that everyone else gives.
        factor = self.adapter.config.microbatches if self.adapter.traits.divides_by_microbatches else 1
        with self._during("backward"):
            self.adapter.backward(value * factor if factor != 1 else value)

    def _during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        # A dispatch mode keeps torch.compile from compiling.
        return self.recorder.during(phase) if self._is_traced else contextlib.nullcontext()

    def _optimize(self) -> None:
        with self._during("step"):
            self.perturbation.at("step", "before")
            self.adapter.step()
            self.perturbation.at("step", "after")


def _detached(output: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors_of(output)]


def copy_pieces(pieces: Pieces | dict[str, Piece]) -> Pieces:
    """Copies of the tensors, sorted by name: ranks and implementations may register in another order."""
    return {
        name: None if piece is None else dataclasses.replace(piece, tensor=piece.tensor.detach().clone())
        for name, piece in sorted(pieces.items())
    }


def as_microbatches(batch: Any) -> list[Batch]:
    """A list is microbatches; each is a tuple of arguments, or the one argument itself."""
    microbatches = batch if isinstance(batch, list) else [batch]
    return [arguments if isinstance(arguments, tuple) else (arguments,) for arguments in microbatches]
