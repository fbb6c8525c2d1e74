"""The oracle: one process, float64, every rank's microbatches replayed one by one, gradients averaged."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import Clip, OptimizerFactory
from shardproof.harness.tensors.trees import map_tensors


@dataclasses.dataclass
class OracleStep:
    """What one step of the oracle computed; every tensor float64 and full, keyed by parameter name.

    ``outputs`` and ``losses`` are per data-parallel rank and microbatch; ``own_gradients`` are per
    rank, before the average; ``clipped`` equals ``gradients`` where nothing clips.
    """

    outputs: list[list[Any]]
    losses: list[list[torch.Tensor]]
    own_gradients: list[dict[str, torch.Tensor | None]]
    gradients: dict[str, torch.Tensor | None]
    norm: torch.Tensor | None
    clipped: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


class Oracle:
    """One process, float64: every rank's microbatches replayed one by one, gradients averaged."""

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, clip: Clip | None) -> None:
        self.model = copy.deepcopy(model).double()
        self.optimizer = optimizer(self.model.parameters()) if optimizer else None
        self.clip = clip
        self._names = dict(self.model.named_parameters())

    def step(
        self,
        batches: Sequence[Sequence[tuple[Any, ...]]],
        *,
        loss: Callable[[Any], torch.Tensor],
        submodule: str = "",
        set_to_none: bool = True,
    ) -> OracleStep:
        """Train one step on ``batches[rank][microbatch]``, each the arguments of one forward."""
        module = self.model.get_submodule(submodule)
        outputs: list[list[Any]] = []
        losses: list[list[torch.Tensor]] = []
        own: list[dict[str, torch.Tensor | None]] = []
        for microbatches in batches:
            outputs.append([])
            losses.append([])
            own.append(dict.fromkeys(self._names))
            for arguments in microbatches:
                output = module(*map_tensors(_to_double, arguments))
                value = loss(output)
                outputs[-1].append(map_tensors(torch.Tensor.detach, output))
                losses[-1].append(value.detach())
                own[-1] = self._add(own[-1], value)
        average = {name: _average([one[name] for one in own]) for name in self._names}
        gradients = self._accumulated(average)
        norm, clipped = self._clipped(gradients)
        if self.optimizer is not None:
            self.optimizer.step()
        parameters = {name: value.detach().clone() for name, value in self._names.items()}
        self.model.zero_grad(set_to_none=set_to_none)
        return OracleStep(outputs, losses, own, gradients, norm, clipped, parameters)

    def _add(self, gradients: dict[str, torch.Tensor | None], loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
        trained = {name: value for name, value in self._names.items() if value.requires_grad}
        new = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return gradients | {name: _sum(gradients[name], gradient) for name, gradient in zip(trained, new, strict=True)}

    def _accumulated(self, average: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Add the averages to what zero_grad left, as backward adds to ``.grad``; a copy of the result."""
        for name, value in self._names.items():
            value.grad = _sum(value.grad, average[name])
        return self._picture()

    def _picture(self) -> dict[str, torch.Tensor | None]:
        return {name: None if value.grad is None else value.grad.clone() for name, value in self._names.items()}

    def _clipped(
        self, gradients: dict[str, torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
        if self.clip is None:
            return None, gradients
        present = [value.grad for value in self._names.values() if value.grad is not None]
        norm = total_norm(present, self.clip.norm_type)
        # torch clips by max_norm / (norm + 1e-6), never up: the published formula of clip_grad_norm_.
        factor = min(1.0, self.clip.max_norm / (float(norm) + 1e-6))
        for gradient in present:
            gradient.mul_(factor)
        return norm, self._picture()


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """(sum over all elements |g|^p)^(1/p), or the largest |g| for p = inf; float64 scalar, 0 without elements."""
    flat = torch.cat([gradient.flatten().double() for gradient in gradients] or [torch.zeros(0)])
    return torch.linalg.vector_norm(flat, norm_type) if flat.numel() else flat.new_zeros(())


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _average(gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The mean over ranks; a rank without a gradient counts as zeros unless none has one."""
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) / len(gradients) if present else None
