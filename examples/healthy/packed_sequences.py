"""Packed sequences: documents of several lengths in one row, with a block mask, positions and a loss by tokens."""

import torch
import torch.distributed as dist
from common import LENGTH, VOCABULARY, Block, finish, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset


def pack(rows):
    tokens = torch.randint(VOCABULARY, (rows, LENGTH))
    starts = torch.rand(rows, LENGTH) < 0.2
    starts[:, 0] = True
    return TensorDataset(tokens, starts.cumsum(1))


class Packed(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(Block(dim, 4, 0.0) for _ in range(2))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens, documents):
        same = documents[:, :, None] == documents[:, None]
        mask = same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.embed(tokens) + self.position(mask.sum(-1) - 1)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return self.head(x)


rank, world = setup()
model = DistributedDataParallel(Packed())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (tokens, documents) in enumerate(loader(pack(64))):
    is_target = documents[:, 1:] == documents[:, :-1]
    labels = tokens[:, 1:].masked_fill(~is_target, -100)
    count = is_target.sum()
    dist.all_reduce(count)
    logits = model(tokens, documents)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * world / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
