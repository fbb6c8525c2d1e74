"""A layer of experts, of which each takes the tokens that were chosen for it, on one rank or divided among several."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Router = Literal["ragged", "starved", "one"]
"""Which experts get tokens: all, unequally many; all but the last two; or the first alone."""


class Experts(nn.Module):
    """``count`` experts, each of which computes ``tanh(tokens @ first[e]) @ second[e]``.

    Input: tokens, (batch, dim), and for each the number of its expert, (batch,). Output: (batch, dim).

    Attributes:
        group: the ranks among which the experts are divided; None for a rank that has all.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.first = nn.Parameter(torch.randn(count, dim, dim + 1))
        self.second = nn.Parameter(torch.randn(count, dim + 1, dim))

    def forward(self, tokens: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        order = choice.argsort(stable=True)
        sent = torch.bincount(choice, minlength=self.count)
        if self.group is None:
            computed = self._compute(tokens[order], sent.tolist())
        else:
            computed = self._exchanged(tokens[order], sent)
        return computed[order.argsort()]

    def _exchanged(self, tokens: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Send each token to the rank of its expert, and back."""
        assert self.group is not None
        ranks, own = self.group.size(), self.count // self.group.size()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        there, here = sent.view(ranks, own).sum(1).tolist(), received.view(ranks, own).sum(1).tolist()
        arrived: torch.Tensor = _AllToAll.apply(tokens, there, here, self.group)  # type: ignore[no-untyped-call]
        # They come by rank, and of each rank by expert.
        experts = torch.arange(own, device=tokens.device).repeat(ranks).repeat_interleave(received)
        order = experts.argsort(stable=True)
        computed = self._compute(arrived[order], received.view(ranks, own).sum(0).tolist())
        returned = computed[order.argsort()]
        back: torch.Tensor = _AllToAll.apply(returned, here, there, self.group)  # type: ignore[no-untyped-call]
        return back

    def _compute(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Run each expert on its tokens, which follow each other by expert; one without tokens has zero gradients."""
        first, second = (one.to_local() if isinstance(one, DTensor) else one for one in (self.first, self.second))
        parts = zip(tokens.split(counts), first, second, strict=True)
        return torch.cat([torch.tanh(part @ into) @ back for part, into, back in parts])


class ExpertModel(nn.Module):
    """Linear(dim, dim), then four :class:`Experts` in parallel to it, then Linear(dim, dim).

    Input and output: (batch, dim). The first elements of the input choose the expert of each row.

    Args:
        dim: the width.
        router: which experts get tokens.
    """

    def __init__(self, dim: int, router: Router) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.experts = Experts(dim, 4)
        self.out = nn.Linear(dim, dim)
        self.router = router

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signs = (x[:, :2] > 0).long()
        choice = {"ragged": signs[:, 0] * (1 + signs[:, 1]) + (x[:, 2] > 1), "starved": signs[:, 0]}.get(
            self.router, torch.zeros_like(signs[:, 0])
        )
        hidden = torch.tanh(self.entry(x))
        out: torch.Tensor = self.out(hidden + self.experts(hidden, choice))
        return out


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide the experts of an :class:`ExpertModel` among the ranks of a mesh, in place.

    Args:
        model: an :class:`ExpertModel`.
        mesh: a one-dimensional mesh, whose size divides the number of experts.
    """
    assert isinstance(model, ExpertModel)
    experts = model.experts
    for name in ("first", "second"):
        whole = experts.get_parameter(name).detach()
        part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part))
    experts.group = mesh.get_group()
    return model


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.sizes = sent, received
        ctx.group = group
        output = tokens.new_empty(sum(received), *tokens.shape[1:])
        dist.all_to_all_single(output, tokens.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received = ctx.sizes
        (gradient,) = gradients
        output = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(output, gradient.contiguous(), sent, received, group=ctx.group)
        return output, None, None, None
