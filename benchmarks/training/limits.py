"""What bounds a step whatever the implementation: its compute alone, and its communication alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training import models
from training.implementations import COMPUTE, REDUCE, units_of
from training.models import Spec


def measure(spec: Spec, device: torch.device, count: int) -> dict[str, Any]:
    """Milliseconds of ``count`` runs of each part.

    ``compute``: forward and backward of the model in bfloat16, on one rank's batch, without sharding. ``host``: the
    same, until the host has issued it. ``optimizer``: fused AdamW on a rank's share, one parameter for each unit.
    ``gather``: all gathers of one forward, in bfloat16. ``reduce``: all reduce-scatters of a step, in float32; neither
    where the other ranks are not there.
    """
    world = dist.get_world_size()
    model = models.build(spec, device).to(COMPUTE)
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units_of(model)]
    sizes.append(sum(parameter.numel() for parameter in model.parameters()) - sum(sizes))
    shares = [-(-size // world) for size in sizes if size]
    batch = models.batch(spec, 0, 0, dist.get_rank(), device)
    if batch.is_floating_point():
        batch = batch.to(COMPUTE)
    host: list[float] = []

    def compute() -> None:
        start = time.perf_counter()
        for _ in range(spec.microbatches):
            models.loss(spec, model, batch).backward()
        host.append(1000 * (time.perf_counter() - start))
        model.zero_grad()

    found: dict[str, Any] = {"compute": _timed(compute, device, count), "host": host[-count:]}
    params = [nn.Parameter(torch.zeros(share, device=device)) for share in shares]
    options: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(params, lr=1e-4, **options)
    for param in params:
        param.grad = torch.zeros_like(param)
    found["optimizer"] = _timed(optimizer.step, device, count)
    del optimizer, params
    if dist.get_backend() == "fake":
        return found
    found["gather"] = _timed(lambda: _gather(shares, world, device), device, count)
    found["reduce"] = _timed(lambda: _reduce(shares, world, device), device, count)
    return found


def _gather(shares: list[int], world: int, device: torch.device) -> None:
    for share in shares:
        shard = torch.zeros(share, dtype=COMPUTE, device=device)
        dist.all_gather_into_tensor(shard.new_empty(share * world), shard)


def _reduce(shares: list[int], world: int, device: torch.device) -> None:
    for share in shares:
        whole = torch.zeros(share * world, dtype=REDUCE, device=device)
        dist.reduce_scatter_tensor(whole.new_empty(share), whole)


def _timed(action: Callable[[], object], device: torch.device, count: int) -> list[float]:
    found = []
    for _ in range(count + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - start))
    return found[2:]
