"""Fills memory that an implementation has freed with NaN, at once and again and again while a run trains."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardproof.harness.collectives.trace import Collective
from shardproof.harness.parity.run import Run
from shardproof.harness.tensors.trees import tensors_of


class Poison:
    """Allocates memory of the sizes of a run's gathered units and shards, fills it with NaN and frees it.

    It does so on the current stream before and after every unit's forward, when a unit's backward begins, and before
    and after every collective, there on the stream that issues it. Memory that was freed while another stream still
    reads or writes it is allocated here, and what that stream reads is a NaN.

    Args:
        run: a run that has not trained yet.
        shards: the number of ranks among which a unit is divided.
    """

    def __init__(self, run: Run, *, shards: int) -> None:
        full = {numel for unit in run.units for numel in (unit.numel, unit.padded_numel)}
        self._numels = sorted(full | {-(-numel // shards) for numel in full})
        device = run.adapter.config.mesh.device_type
        self._device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
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

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._fill()
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._fill())

    def _before_collective(self, collective: Collective) -> None:
        self._fill()
        self._before(collective)

    def _after_collective(self, collective: Collective) -> None:
        self._after(collective)
        self._fill()
