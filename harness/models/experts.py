"""A small mixture of experts, and its plan of expert parallelism.

The plan is applied before the implementation shards the model; the baseline is the model without it.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardproof.harness.models.plain import Stacked
from shardproof.harness.tensors.trees import local_of

COUNT = 4
"""The number of experts of a layer."""

Routing = Literal["ragged", "tied", "starved", "one", "parted"]
"""Which experts get tokens.

- "ragged": all, unequally many.
- "tied": the first two in the first step, since all scores are equal; then as "ragged".
- "starved": the first two, of all rows.
- "one": the first alone, of all rows.
- "parted": the first two, of rows whose first element is negative; all, of other rows.
"""


class Experts(nn.Module):
    """Experts, each of which computes ``tanh(tokens @ first[e]) @ second[e]``.

    Input: tokens, (n, dim), and for each the number of its expert, (n,). Output: (n, dim).

    Attributes:
        group: the ranks among which the experts are divided; without, a rank has all.
        tensor: the mesh over which each expert is cut as well, if it is.
        skips: whether a rank leaves out its experts if none of them gets a token; else they have zero gradients.
    """

    group: dist.ProcessGroup | None = None
    tensor: DeviceMesh | None = None
    skips = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(COUNT, dim, dim + 2))
        self.second = nn.Parameter(torch.randn(COUNT, dim + 2, dim))

    def forward(self, tokens: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        order = choice.argsort(stable=True)
        sent = torch.bincount(choice, minlength=COUNT)
        if self.group is None:
            computed = self._compute(tokens[order], sent.tolist())
        else:
            computed = self._exchanged(tokens[order], sent)
        return computed[order.argsort()]

    def _exchanged(self, tokens: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Send each token to the rank of its expert, and back."""
        assert self.group is not None
        ranks, own = self.group.size(), COUNT // self.group.size()
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
        """Run each expert on its tokens, which follow each other by expert."""
        if self.skips and not sum(counts):
            return tokens
        if self.tensor is not None:
            tokens = DTensor.from_local(tokens, self.tensor, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
        first, second = map(local_of, (self.first, self.second))
        parts = zip(tokens.split(counts), first, second, strict=True)
        computed = torch.cat([torch.tanh(part @ into) @ back for part, into, back in parts])
        if self.tensor is not None:
            computed = DTensor.from_local(computed, self.tensor, [Partial()], run_check=False).full_tensor()
        return computed


class MixtureLayer(nn.Module):
    """Adds to each row what the experts that a router chooses for it compute, weighted by their scores.

    Of experts with equal scores the first is chosen, so that every device chooses the same. Input and output: (batch,
    dim).

    Attributes:
        favour: (2, COUNT), what is added to the scores for the choice: of rows whose first element is negative, and of
            others.
    """

    favour: torch.Tensor

    def __init__(self, dim: int, routing: Routing) -> None:
        super().__init__()
        self.router = nn.Linear(dim, COUNT, bias=False)
        self.experts = Experts(dim)
        self.chosen = 1 if routing == "one" else 2
        if routing == "tied":
            nn.init.zeros_(self.router.weight)
        favour = torch.zeros(2, COUNT)
        kinds = {"starved": slice(None), "one": slice(None), "parted": slice(1)}.get(routing, slice(0))
        favour[kinds, self.chosen :] = -1  # all scores are between 0 and 1
        self.register_buffer("favour", favour)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call :meth:`mix`."""
        return self.mix(x)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output."""
        scores = self.router(x).softmax(-1)
        favoured = scores + self.favour[(x[:, 0] >= 0).long()]
        choice = favoured.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
        computed = self.experts(x.repeat_interleave(self.chosen, 0), choice.flatten())
        weights = scores.gather(1, choice).unsqueeze(-1)
        out: torch.Tensor = x + (weights * computed.view(*choice.shape, -1)).sum(1)
        return out


class Mixture(Stacked):
    """A factor for each column, two layers, each a router and four experts, and a Linear(dim, dim).

    The factors and the last are in the root's own unit. The factors begin as ones, so that the first layer chooses by
    the signs of the model's own input; its tokens need gradients, also where no expert of a rank computes anything.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int = 4, routing: Routing = "ragged") -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureLayer(dim, routing) for _ in range(2))
        self.factors = nn.Parameter(torch.ones(dim))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factors)


def divide_experts(model: nn.Module, mesh: DeviceMesh, *, skips: bool = False) -> nn.Module:
    """Divide the experts of a :class:`Mixture` among the ranks of a mesh, in place.

    Args:
        mesh: of one dimension, whose size divides the number of experts, or of a second one as well over which tensor
            parallelism cuts each expert.
        skips: see :class:`Experts`.
    """
    assert isinstance(model, Mixture)
    for layer in model.layers:
        experts = layer.get_submodule("experts")
        assert isinstance(experts, Experts)
        for name, dim in (("first", 2), ("second", 1)):
            whole = experts.get_parameter(name).detach()
            part = distribute_tensor(whole, mesh, [Shard(0), Shard(dim)][: mesh.ndim], src_data_rank=None)
            setattr(experts, name, nn.Parameter(part))
        experts.group, experts.skips = mesh.get_group(0), skips
        experts.tensor = mesh[(mesh.mesh_dim_names or ())[1]] if mesh.ndim > 1 else None
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
