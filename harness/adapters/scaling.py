"""Scales losses on a device where gradients are on the CPU, which torch's scalers do not (F-74 of docs/findings.md)."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.config import Config
from shardproof.harness.tensors import private


class OffloadedGradScaler(torch.amp.GradScaler):
    """Unscales gradients on the CPU, and lets all ranks know of an infinite one through the device's collectives.

    torch's scalers read the inverse of the scale before it has arrived on the CPU, and ``GradScaler`` asks the other
    ranks by a collective on the CPU, for which a world of NCCL alone has no backend.

    Args:
        mesh: all ranks that share the parameters, on the device of the losses.
        init_scale: by what the first losses are multiplied.
        growth_interval: the number of steps without infinite gradients after which the scale is doubled.
    """

    def __init__(self, mesh: DeviceMesh, *, init_scale: float, growth_interval: int) -> None:
        super().__init__(mesh.device_type, init_scale=init_scale, growth_interval=growth_interval)
        self._groups = mesh.get_all_groups()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        inverse, infinite = inv_scale.cpu(), found_inf.cpu()
        gradients = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    gradients[local.dtype].append(local)
        unscale = private.need("torch._amp_foreach_non_finite_check_and_unscale_")
        for same_dtype in gradients.values():
            unscale(same_dtype, infinite, inverse)
        found_inf.copy_(infinite)
        for one in self._groups:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=one)
        return {found_inf.device: found_inf}


def make_scaler(
    config: Config, kind: type[torch.amp.GradScaler], *, init_scale: float, growth_interval: int
) -> torch.amp.GradScaler:
    """Make a scaler of ``kind``, or one for gradients on the CPU where the configuration has them apart from losses."""
    if config.offload and config.mesh.device_type != "cpu":
        return OffloadedGradScaler(config.mesh, init_scale=init_scale, growth_interval=growth_interval)
    return kind(config.mesh.device_type, init_scale=init_scale, growth_interval=growth_interval)
