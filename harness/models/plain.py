"""The small models that cases train.

Smooth unless a kink is the point: a ReLU turns an ulp of difference near zero into a different
gradient. Widths are uneven on purpose where a default is given: most bugs of sharded layouts
hide behind sizes that divide.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardproof.harness.tensors.trees import tensors_of


class TwoHeads(nn.Module):
    """Two Linear(dim, dim) on one input; returns (tanh(head0 x), tanh(head1 x)), each (batch, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head0 = nn.Linear(dim, dim)
        self.head1 = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.head0(x)), torch.tanh(self.head1(x))


class SkippedModule(nn.Module):
    """As :class:`TwoHeads` but ``head1`` never runs; returns (batch, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head0 = nn.Linear(dim, dim)
        self.head1 = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head0(x))


class MLP(nn.Module):
    """dim -> multiplier x dim -> dim with GELU and a final tanh; (batch, dim) to (batch, dim)."""

    def __init__(self, dim: int, multiplier: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, multiplier * dim)
        self.out_proj = nn.Linear(multiplier * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out_proj(F.gelu(self.in_proj(x))))


class Stacked(nn.Module):
    """A model with ``layers``, called one after the other; each is a unit, and the rest is the root's."""

    layers: nn.ModuleList
    calls: Literal["plain", "recomputed", "recomputed-reentrant"] = "plain"
    """Whether backward recomputes each layer from its input; see ``shardproof.harness.models.recomputation``."""

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Call each layer on the output of the one before."""
        for layer in self.layers:
            if self.calls == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.calls == "recomputed-reentrant")
        return x

    def units(self) -> list[list[str]]:
        """One unit for each layer."""
        return [[f"layers.{index}"] for index in range(len(self.layers))]


class Tower(Stacked):
    """``depth`` MLPs with multipliers 2, 3, 4, ... and a Linear(dim, dim) of the root's own.

    Every unit has a size of its own, so that the bytes of a collective name its unit.
    """

    def __init__(self, dim: int, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(dim, multiplier=2 + index) for index in range(depth))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(x))
        return out


class NormedStack(Stacked):
    """A LayerNorm without bias and three MLPs, all of them units: the root has no parameters of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, bias=False)
        self.layers = nn.ModuleList(MLP(dim, multiplier) for multiplier in (3, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_layers(self.norm(x))


def two_linear(first: tuple[int, int], second: tuple[int, int]) -> nn.Sequential:
    """Linear(*first), GELU, Linear(*second); a single unit when only the root is sharded."""
    return nn.Sequential(nn.Linear(*first), nn.GELU(), nn.Linear(*second))


class ReusedInner(nn.Module):
    """Runs ``inner`` Linear(dim, dim) twice and ``outer`` Linear(dim, dim + 1) once."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, dim + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))
        return out


class Encoder(nn.Module):
    """A Linear(dim, dim) behind ``features``; calling the module itself is an error."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the parent calls."""
        return torch.tanh(self.inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only features() is called")


class TwoStage(nn.Module):
    """Runs a method of ``encoder`` other than forward, then ``projector``, a Linear(dim, dim + 1)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.encoder = Encoder(dim)
        self.projector = nn.Linear(dim, dim + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.projector(self.encoder.features(x))
        return out


class NoInputs(nn.Module):
    """A (dim, dim) parameter of the root's own; its forward takes nothing and returns the tanh of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self) -> torch.Tensor:
        return torch.tanh(self.weight)


class TwoPaths(nn.Module):
    """Linear(dim, 8), then ``first`` or ``second``, of 64 elements each, so that a collective of one fits the other.

    ``second`` starts frozen; :meth:`flip` goes over to the other path and freezes the one that it leaves.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 8, bias=False))
        self.takes_second = False
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = self.second if self.takes_second else self.first
        return torch.tanh(path(torch.tanh(self.entry(x))))

    def flip(self) -> None:
        """Take the other path from now on, and train what is on it alone."""
        self.first.requires_grad_(self.takes_second)
        self.takes_second = not self.takes_second
        self.second.requires_grad_(self.takes_second)


Container = Literal["list", "tuple", "dict", "namedtuple", "dataclass"]


class NamedPair(NamedTuple):
    """A namedtuple between units: ``x`` is trained, ``y`` needs no gradient."""

    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Record:
    """A dataclass between units: ``x`` is trained, ``y`` needs no gradient."""

    x: torch.Tensor
    y: torch.Tensor


class Packed(nn.Module):
    """Two Linear(dim, dim) on the tensor ``x`` inside a container, which is rebuilt around the result."""

    def __init__(self, dim: int, container: Container) -> None:
        super().__init__()
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.container = container

    def forward(self, packed: Any) -> Any:
        hidden = torch.tanh(self.lin1(unpack(packed, self.container)))
        return pack(torch.tanh(self.lin2(hidden)), self.container)


class Packing(nn.Module):
    """Without parameters: a tensor to its container, or back."""

    def __init__(self, container: Container, *, inverse: bool = False) -> None:
        super().__init__()
        self.container = container
        self.inverse = inverse

    def forward(self, value: Any) -> Any:
        return unpack(value, self.container) if self.inverse else pack(value, self.container)


def packed_stack(dim: int, container: Container, depth: int = 3) -> nn.Sequential:
    """Packing, ``depth`` Packed blocks, unpacking: only containers pass between the blocks."""
    blocks = [Packed(dim, container) for _ in range(depth)]
    return nn.Sequential(Packing(container), *blocks, Packing(container, inverse=True))


def pack(x: torch.Tensor, container: Container) -> Any:
    """``x`` in a container, beside a tensor that needs no gradient where the container has room."""
    constant = torch.ones_like(x)
    packed: dict[Container, Any] = {
        "list": [x],
        "tuple": (x,),
        "dict": {"x": x},
        "namedtuple": NamedPair(x, constant),
        "dataclass": Record(x, constant),
    }
    return packed[container]


def unpack(packed: Any, container: Container) -> torch.Tensor:
    """The trained tensor in the container.

    Raises:
        AssertionError: a unit changed the container's type on the way.
    """
    kinds: dict[Container, type] = {
        "list": list, "tuple": tuple, "dict": dict, "namedtuple": NamedPair, "dataclass": Record,
    }  # fmt: skip
    kind = kinds[container]
    assert type(packed) is kind, f"expected {kind.__name__} between units, got {type(packed).__name__}"
    x: torch.Tensor = next(tensors_of(packed))
    return x


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of :class:`Transformer`; the defaults give a few thousand parameters."""

    layers: int = 2
    vocabulary: int = 11
    length: int = 8
    dim: int = 12
    heads: int = 3
    is_tied: bool = False
    """The output projection is the token embedding."""


class Block(nn.Module):
    """Pre-norm causal attention without biases and a GELU feed-forward with them; (batch, length, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, 4 * dim)
        self.w2 = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self._attend(self.qkv(self.attention_norm(x))))
        out: torch.Tensor = x + self.w2(F.gelu(self.w1(self.feed_forward_norm(x))))
        return out

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        # Written out: fused kernels differ between devices and dtypes, and the oracle runs in float64.
        batch, length, _ = qkv.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
        mixed: torch.Tensor = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Transformer(Stacked):
    """A causal language model: int64 tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()
        config = config or TransformerConfig()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(config.length, config.dim)
        self.layers = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        if config.is_tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: torch.Tensor = self.output(self.norm(self.run_layers(x)))
        return logits


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, for a case that trains twins."""
    return copy.deepcopy(model)


# losses ------------------------------------------------------------------------------------


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """The mean of the squares: every element pulls on every parameter, none cancels."""
    return output.square().mean()


def ramp_square(output: torch.Tensor) -> torch.Tensor:
    """The mean square distance from -1 to 1 along the last dimension.

    For the output of a normalisation, whose own mean square hardly depends on anything: gradients of that are rounding.
    """
    ramp = torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype, device=output.device)
    return mean_square(output - ramp)


def both_heads(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Uses both outputs of :class:`TwoHeads`."""
    return (outputs[0] * outputs[1]).mean() + mean_square(outputs[0])


def first_head(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Ignores the second output of :class:`TwoHeads`."""
    return mean_square(outputs[0])
