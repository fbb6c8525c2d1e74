"""The shapes that ``shardproof plan --model`` knows by name."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

# Transformers as scripts write them, of any size: GPT with learned positions, Llama with rotary ones.
#
# Of operators that every device has in one form: a fused kernel of one device would save other tensors for backward
# than the same function on another, and a plan is made on the CPU for a training on GPUs.


_ROTARY_BASE = 10_000.0
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a transformer of a family, "gpt" or "llama"."""

    family: str
    layers: int
    dim: int  # width
    heads: int
    key_heads: int  # heads of keys and values, which divide ``heads``
    hidden: int  # width of the layers behind attention
    vocab: int  # size of the vocabulary
    tied: bool  # whether the last layer is the embedding
    length: int  # tokens of a sequence, by default; GPT has positions for so many
    like: str  # the published model that has these sizes, or what they are chosen for


class GptBlock(nn.Module):
    """A layer of GPT: (batch, length, dim) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.dim // shape.heads
        self.attention_norm = nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.out = nn.Linear(shape.dim, shape.dim)
        self.mlp_norm = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (_split(one, self.size) for one in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
        x = x + self.out(_attend(query, key, value))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + added


class Gpt(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocab)."""

    #: The fused layer's output is gathered, because a rank's part of it is not its heads of each of the three.
    tp_plan: ClassVar[dict[str, str]] = {
        "tokens": "embedding_rowwise", "layers.*.qkv": "colwise_gather_output", "layers.*.out": "rowwise_split_input",
        "layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output",
    }  # fmt: skip

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.positions = nn.Embedding(length, shape.dim)
        self.layers = nn.ModuleList(GptBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class RmsNorm(nn.Module):
    """Divides by the root of the mean square over the last dimension, in float32: any shape to the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)
        return normed.type_as(x) * self.weight


class LlamaBlock(nn.Module):
    """A layer of Llama: (batch, length, dim), cosines and sines (length, dim / heads) to (batch, length, dim)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, self.repeats = shape.dim // shape.heads, shape.heads // shape.key_heads
        keys = self.size * shape.key_heads
        self.attention_norm = RmsNorm(shape.dim)
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, keys, bias=False)
        self.value = nn.Linear(shape.dim, keys, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.mlp_norm = RmsNorm(shape.dim)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        query = _rotated(_split(self.query(normed), self.size), cosines, sines)
        key = _rotated(_split(self.key(normed), self.size), cosines, sines)
        value = _split(self.value(normed), self.size)
        if self.repeats > 1:
            key, value = (one.repeat_interleave(self.repeats, dim=1) for one in (key, value))
        x = x + self.out(_attend(query, key, value))
        normed = self.mlp_norm(x)
        added: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + added


class Llama(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocab)."""

    cosines: torch.Tensor
    sines: torch.Tensor

    tp_plan: ClassVar[dict[str, str]] = {
        "tokens": "embedding_rowwise",
        **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "gate", "up")},
        **{f"layers.*.{name}": "rowwise" for name in ("out", "down")},
        "head": "colwise_gather_output",
    }

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.key_heads = shape.key_heads
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        size = shape.dim // shape.heads
        frequencies = _ROTARY_BASE ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        length = tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cosines[:length], self.sines[:length])
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _split(x: torch.Tensor, size: int) -> torch.Tensor:
    """(batch, length, heads * size) to (batch, heads, length, size), of all heads or of a tensor-parallel rank's."""
    parts: torch.Tensor = x.unflatten(-1, (-1, size))
    return parts.transpose(1, 2)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of (batch, heads, length, size) to (batch, length, heads * size)."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of elements by their position's angle: (batch, heads, length, size) to the same."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat((-second, first), dim=-1) * sines.to(x.dtype)


def _gpt(layers: int, dim: int, heads: int, **others: Any) -> Shape:
    sizes: dict[str, Any] = {"layers": layers, "dim": dim, "heads": heads, "key_heads": heads, "hidden": 4 * dim}
    return Shape(family="gpt", vocab=50257, tied=True, **sizes, **others)


def _llama(layers: int, dim: int, heads: int, key_heads: int, hidden: int, **others: Any) -> Shape:
    sizes: dict[str, Any] = {"layers": layers, "dim": dim, "heads": heads, "key_heads": key_heads, "hidden": hidden}
    return Shape(family="llama", length=2048, **{"tied": False} | sizes | others)


KNOWN = {
    "gpt:0.1b": _gpt(12, 768, 12, length=1024, like="GPT-2 small"),
    "gpt:0.4b": _gpt(24, 1024, 16, length=1024, like="GPT-2 medium"),
    "gpt:0.8b": _gpt(36, 1280, 20, length=1024, like="GPT-2 large"),
    "gpt:1.6b": _gpt(48, 1600, 25, length=1024, like="GPT-2 XL"),
    "gpt:6.7b": _gpt(32, 4096, 32, length=2048, like="GPT-3 6.7B"),
    "gpt:13b": _gpt(40, 5120, 40, length=2048, like="GPT-3 13B, with heads of 128 elements"),
    "llama:0.9b": _llama(16, 2048, 16, 8, 5632, vocab=32000, like="the width of TinyLlama, fewer layers"),
    "llama:1.2b": _llama(16, 2048, 32, 8, 8192, vocab=128256, tied=True, like="Llama 3.2 1B"),
    "llama:3.2b": _llama(28, 3072, 24, 8, 8192, vocab=128256, tied=True, like="Llama 3.2 3B"),
    "llama:7b": _llama(32, 4096, 32, 32, 11008, vocab=32000, like="Llama 2 7B"),
    "llama:8b": _llama(32, 4096, 32, 8, 14336, vocab=128256, like="Llama 3 8B"),
    "llama:13b": _llama(40, 5120, 40, 40, 13824, vocab=32000, like="Llama 2 13B"),
    "llama:33b": _llama(60, 6656, 52, 52, 17920, vocab=32000, like="Llama 1 33B"),
    "llama:70b": _llama(80, 8192, 64, 8, 28672, vocab=128256, like="Llama 3 70B"),
}
"""By the names that ``--model`` takes: the family, and the parameters in units of 10^9."""

FAMILIES = frozenset(name.partition(":")[0] for name in KNOWN)


def shape_of(name: str, known: Mapping[str, Shape] = KNOWN) -> Shape:
    """Return the shape of this name; another one is a ValueError of one line, with the names that are known."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"no shape is called {name!r}; known are {', '.join(known)}.{hint}")


#: The fewest elements of a head, and of what the vocabulary and the layers behind attention are a multiple.
_LEAST_HEAD = _MULTIPLE = 8


def resized(shape: Shape, *, layers: int | None, dim: int | None) -> Shape:
    """Return a shape of the same family with other numbers: ``layers``, and the width with what follows from it.

    The layers behind attention and the vocabulary keep their ratio to the width, rounded up to a multiple of 8. Of
    heads there are the most that divide the width into heads of an even number of at least 8 elements, at most as many
    as the shape has; as many of them share a head of keys as there, or else two, or none. A width without such heads is
    a ValueError of one line.
    """
    layers = shape.layers if layers is None else layers
    if dim is None or dim == shape.dim:
        return dataclasses.replace(shape, layers=layers)
    most, shared = min(shape.heads, dim // _LEAST_HEAD), shape.heads // shape.key_heads
    fitting = ((heads, by) for by in (shared, min(shared, 2), 1) for heads in range(most // by * by, 0, -by))
    heads, shared = next(((heads, by) for heads, by in fitting if dim % (2 * heads) == 0), (0, 1))
    if not heads:
        raise ValueError(f"--dim {dim} does not divide into heads of an even size of at least {_LEAST_HEAD}")
    hidden, vocab = (-(-one * dim // shape.dim // _MULTIPLE) * _MULTIPLE for one in (shape.hidden, shape.vocab))
    return dataclasses.replace(
        shape, layers=layers, dim=dim, heads=heads, key_heads=heads // shared, hidden=hidden, vocab=vocab
    )


def build(shape: Shape, length: int) -> nn.Module:
    """Make the model of a shape on the default device, with positions for ``length`` tokens."""
    return Gpt(shape, length) if shape.family == "gpt" else Llama(shape, length)
