"""What a project keeps in its utils.py, data.py and model.py: start, data, a small GPT, logging, the end."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
VOCABULARY, LENGTH, CLASSES = 64, 16, 10


def setup() -> tuple[int, int]:
    """Join the process group and seed the model alike on all ranks; returns this rank and the number of ranks."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29544")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    return dist.get_rank(), dist.get_world_size()


def images(count: int = 64, size: int = 8) -> TensorDataset:
    """Images whose class is the largest of their first pixels."""
    pixels = torch.randn(count, 3, size, size)
    return TensorDataset(pixels, pixels.flatten(1)[:, :CLASSES].argmax(-1))


def text(count: int = 64, length: int = LENGTH) -> TensorDataset:
    """Sequences of tokens that count up, and for each token the next."""
    tokens = (torch.randint(VOCABULARY, (count, 1)) + torch.arange(length + 1)) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loader(dataset: Dataset, batch: int = 16) -> DataLoader:
    """Batches of ``batch`` samples, of which each rank reads its part."""
    return DataLoader(dataset, batch // dist.get_world_size(), sampler=DistributedSampler(dataset, shuffle=False))


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*split, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A decoder of tokens; ``tied`` shares the embedding's weight with the head."""

    def __init__(self, dim: int = 32, depth: int = 2, heads: int = 4, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def log(step: int, **values: torch.Tensor | float) -> None:
    """Print this rank's values with all their bits."""
    rank = os.environ.get("RANK", "0")
    numbers = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    line = "  ".join(f"{name} {number:.4f} {float(number).hex()}" for name, number in numbers.items())
    print(f"rank {rank} step {step}  {line}", flush=True)


def finish(*models: nn.Module) -> None:
    """Print a checksum of what this rank has of the parameters and buffers, which a script would save, and end."""
    digest = hashlib.sha256()
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    print(f"rank {os.environ.get('RANK', '0')} ends with {digest.hexdigest()[:16]}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
