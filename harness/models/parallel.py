"""Models that tensor parallelism can cut, and the plans by which it does.

A plan is given to ``parallelize_module`` before anything shards the model; the unsharded model is the
baseline. Sizes need not divide: what passes between the two projections of an MLP stays a DTensor,
which knows its own size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardproof.harness.models.plain import MLP, Stacked, TransformerConfig

SEQUENCE = 1
"""The dimension along which sequence parallelism cuts activations of (batch, length, dim)."""


class MLPStack(Stacked):
    """Three MLPs and, if ``normed``, a LayerNorm without bias, which is the root's; (..., dim) to (..., dim)."""

    def __init__(self, dim: int, *, normed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(dim, multiplier) for multiplier in (3, 4, 3))
        self.norm = nn.LayerNorm(dim, bias=False) if normed else nn.Identity()
        self.gather = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gather(self.norm(self.run_layers(x)))
        return out


def parallelize_mlps(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Cut an :class:`MLPStack` over a one-dimensional mesh; with ``sequence`` what is between its layers too."""
    assert isinstance(model, MLPStack)
    between: dict[str, Any] = {"input_layouts": Shard(SEQUENCE)} if sequence else {}
    plan: dict[str, Any] = {}
    for index in range(len(model.layers)):
        plan[f"layers.{index}.in_proj"] = ColwiseParallel(**between, use_local_output=False)
        plan[f"layers.{index}.out_proj"] = RowwiseParallel(
            output_layouts=Shard(SEQUENCE) if sequence else Replicate(),
        )
    if sequence:
        plan["norm"] = SequenceParallel()
        plan["gather"] = _gathered()
        parallelize_module(model.layers[0], mesh, _split())
    return parallelize_module(model, mesh, plan)


def _split() -> PrepareModuleInput:
    """What every rank has whole goes in cut along the sequence."""
    return PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(SEQUENCE),), use_local_output=True
    )


def _gathered() -> PrepareModuleInput:
    """What is cut along the sequence goes in whole."""
    return PrepareModuleInput(
        input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),), use_local_output=True
    )


class Projections(nn.Module):
    """Three linear layers with a GELU after the first; (batch, 5) to (batch, 12)."""

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.split = nn.Identity()
        self.norm = nn.RMSNorm(5) if normed else nn.Identity()
        self.net1 = nn.Linear(5, 8)
        self.net2 = nn.Linear(8, 4)
        self.net3: nn.Module = nn.Linear(4, 12)
        self.gather = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net2(F.gelu(self.net1(self.norm(self.split(x)))))
        out: torch.Tensor = self.gather(self.net3(hidden))
        return out


def parallelize_projections(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut two layers of :class:`Projections`; around them each tensor-parallel rank has its own part of the batch.

    The third layer stays a plain module, whose gradients on a rank are those of its part of the batch: a script adds
    them over the tensor-parallel ranks. The norm is told that it is replicated, and has its gradients added.
    """
    assert isinstance(model, Projections)
    whole, own = Replicate(), Shard(0)
    plan: dict[str, Any] = {
        "split": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(own,), use_local_output=True),
        "net1": ColwiseParallel(input_layouts=own),
        "net2": RowwiseParallel(output_layouts=own),
        "gather": PrepareModuleInput(input_layouts=(own,), desired_input_layouts=(whole,), use_local_output=True),
    }
    if isinstance(model.norm, nn.RMSNorm):
        plan["norm"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    return parallelize_module(model, mesh, plan)


class Buffered(nn.Module):
    """A parameter and a buffer of (dim, dim), added to the input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight + self.offset


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make a DTensor that is whole on every rank of the mesh of each parameter and buffer."""
    return distribute_module(model, mesh)


class Attention(nn.Module):
    """Causal attention with projections of their own for queries, keys and values, without biases."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # As many heads as this rank's part of the projections has.
        q, k, v = (
            project(x).view(batch, length, -1, self.width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-2, -1)) * self.width**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """dim -> 4 dim -> dim with GELU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 4 * dim)
        self.w2 = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.gelu(self.w1(x)))
        return out


class SplitBlock(nn.Module):
    """Pre-norm attention and feed-forward, as modules that a plan can name."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


#: Heads, width and length divide by two; the vocabulary does not.
SPLIT_CONFIG = TransformerConfig(layers=2, vocabulary=11, length=8, dim=12, heads=2)


class SplitTransformer(Stacked):
    """As ``models.Transformer``, of modules that a plan can name."""

    def __init__(self, config: TransformerConfig = SPLIT_CONFIG) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(config.length, config.dim)
        self.layers = nn.ModuleList(SplitBlock(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.run_layers(self.tokens(tokens) + self.positions(positions))
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def parallelize_transformer(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Cut a :class:`SplitTransformer` over a one-dimensional mesh; with ``sequence`` the residual stream too."""
    assert isinstance(model, SplitTransformer)
    between = Shard(SEQUENCE) if sequence else Replicate()
    plan: dict[str, Any] = {
        "tokens": ColwiseParallel(output_layouts=between),
        "positions": ColwiseParallel(output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for index in range(len(model.layers)):
        layer = f"layers.{index}."
        plan |= {f"{layer}attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan[f"{layer}attention.out"] = RowwiseParallel(output_layouts=between)
        plan[f"{layer}feed_forward.w1"] = ColwiseParallel()
        plan[f"{layer}feed_forward.w2"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan |= {f"{layer}{name}": _gathered() for name in ("attention", "feed_forward")}
            plan |= {f"{layer}{name}_norm": SequenceParallel() for name in ("attention", "feed_forward")}
    return parallelize_module(model, mesh, plan)
