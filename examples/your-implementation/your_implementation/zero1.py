"""ZeRO stage 1 on top of DistributedDataParallel. Put your implementation in its place."""

import contextlib
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ZeroOne:
    """Trains a model whose optimizer state is divided among the ranks, parameter by parameter.

    Args:
        model: equal on all ranks.
        optimizer: makes the optimizer of the parameters that this rank owns; None trains without one.
        group: the ranks.
        find_unused: whether some parameters may get no gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
        *,
        group: dist.ProcessGroup,
        find_unused: bool = False,
    ) -> None:
        self.group = group
        self.module = DistributedDataParallel(
            model, process_group=group, find_unused_parameters=find_unused, broadcast_buffers=False
        )
        own = list(model.parameters())[group.rank() :: group.size()]
        self.optimizer = optimizer(own) if optimizer and own else None

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Surround a microbatch whose gradients are not reduced yet."""
        return self.module.no_sync()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients, which every rank has in full, and return their norm."""
        if norm_type != 2.0:
            raise NotImplementedError(f"ZeroOne clips by the 2-norm alone, not by {norm_type}")
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def step(self) -> None:
        """Update the parameters that this rank owns, and send them to the others."""
        if self.optimizer is not None:
            self.optimizer.step()
        for index, parameter in enumerate(self.module.parameters()):
            dist.broadcast(parameter.detach(), group=self.group, group_src=index % self.group.size())
