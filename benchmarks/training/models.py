"""The models that are trained: transformers, and units of many small parameters."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row of the table: a model and what a step of it is."""

    name: str
    layers: int  # how many units there are beside the root's
    dim: int
    vocab: int = 0  # size of the vocabulary; 0 for the model of small parameters
    batch: int = 2  # sequences of a microbatch, on each rank
    length: int = 128
    small: int = 0  # parameters of a unit, for the model of small parameters
    microbatches: int = 1  # of a step; only the last one reduces
    shape: tuple[int, int] | None = None  # replicas and shards of the mesh, if not one dimension of all ranks
    tensor_parallel: int = 1  # ranks among which the linear layers behind attention are divided

    @property
    def units(self) -> int:
        """Units with the root's."""
        return self.layers + (1 if self.vocab else 0)


LARGE = Spec("0.94 B, 16 x 2048", 16, 2048, vocab=32000, length=2048)
DEEP = Spec("48 x 256", 48, 256, vocab=1024)
SMALL = Spec("16 units of 128 small parameters", 16, 64, small=128)

#: By the names that ``--models`` takes.
SPECS = {
    "large": LARGE,
    "deep": DEEP,
    "small": SMALL,
    # With next to no compute: what is left is what an implementation does around it.
    "thin": Spec("48 x 32, 4 tokens", 48, 32, vocab=64, batch=1, length=4),
    "thin-small": dataclasses.replace(SMALL, name="16 units of 128 parameters of 8", dim=8, batch=1),
    "accumulated": dataclasses.replace(DEEP, name="48 x 256, 4 microbatches", microbatches=4),
    "large-accumulated": dataclasses.replace(LARGE, name="0.94 B, 4 microbatches", microbatches=4),
    "replicas": dataclasses.replace(DEEP, name="48 x 256, replicas of one shard", shape=(2, 1)),
    "hybrid": dataclasses.replace(LARGE, name="0.94 B, 2 replicas of 2 shards", shape=(2, 2)),
    "tensor-parallel": dataclasses.replace(LARGE, name="0.94 B, tensor parallel over 2", tensor_parallel=2),
    "ten": Spec("10 M, 8 x 320, 512 tokens", 8, 320, vocab=1024, batch=4),
    "ten-wide": Spec("10 M, 5 x 1440", 5, 1440, small=2, batch=512),
    "tiny-hybrid": Spec("2 x 32, 2 replicas of 2 shards", 2, 32, vocab=64, length=8, shape=(2, 2)),
    "tiny": Spec("2 x 32", 2, 32, vocab=64, length=8),
    "tiny-small": Spec("2 units of 4 small parameters", 2, 8, small=4),
}


class Layer(nn.Module):
    """A layer of a transformer: (batch, length, dim) to the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(dim // 64, 1)
        self.before_attention = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.before_mlp = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        split = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocab)."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab, spec.dim)
        self.layers = nn.ModuleList(Layer(spec.dim) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.dim)
        self.head = nn.Linear(spec.dim, spec.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Chain(nn.Module):
    """One unit of many small parameters: (batch, dim) to the same."""

    def __init__(self, dim: int, parameters: int) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Linear(dim, dim) for _ in range(parameters // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for link in self.links:
            x = x + torch.tanh(link(x))
        return x


class Small(nn.Module):
    """Units of many small parameters; the root has none."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Chain(spec.dim, spec.small) for _ in range(spec.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(spec: Spec, device: torch.device) -> nn.Module:
    """The model, with the same values on every rank and in every process."""
    torch.manual_seed(0)
    with torch.device(device):
        return Small(spec) if spec.small else Transformer(spec)


def batch(spec: Spec, step: int, microbatch: int, rank: int, device: torch.device) -> torch.Tensor:
    """What one rank is given: tokens with one more than the length, or an input of the small model."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * microbatch + rank)
    if spec.small:
        return torch.randn(spec.batch, spec.dim, generator=generator).to(device)
    return torch.randint(spec.vocab, (spec.batch, spec.length + 1), generator=generator).to(device)


def loss(spec: Spec, model: Any, given: torch.Tensor) -> torch.Tensor:
    """Run the model on one microbatch: a mean over its elements, float32, divided by the number of microbatches."""
    if spec.small:
        return model(given).float().square().mean() / spec.microbatches
    logits = model(given[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), given[:, 1:].flatten()) / spec.microbatches
