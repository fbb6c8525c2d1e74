"""FSDP2: a loss that is divided by the tokens of all ranks, and averaged over the ranks again.

    shardproof check --model g01_divided_twice.py:model --parallelize g01_divided_twice.py:parallelize \
        --data g01_divided_twice.py:data --step g01_divided_twice.py:step --mesh dp=4

The reduction of ``fully_shard`` divides by the number of ranks, so ``step`` must multiply by it, as ``healthy`` does.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

BATCH, LENGTH, DIM, VOCABULARY, MAX_NORM = 2, 8, 16, 32, 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def model():
    return Net()


def parallelize(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def data(step, rank):
    made = torch.Generator().manual_seed(100 * step + rank)
    microbatches = []
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=made)
        labels = tokens[:, 1:].clone()
        labels[:, : 2 * rank] = -100
        microbatches.append((tokens[:, :-1], labels))
    return microbatches


def step(model, optimizer, microbatches, mesh, factor=1):
    count = torch.tensor(sum(int((labels >= 0).sum()) for _, labels in microbatches), device=mesh.device_type)
    dist.all_reduce(count, group=mesh["dp"].get_group())
    for i, (tokens, labels) in enumerate(microbatches):
        model.set_requires_gradient_sync(i == len(microbatches) - 1)
        losses = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (factor * losses / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def healthy(model, optimizer, microbatches, mesh):
    step(model, optimizer, microbatches, mesh, factor=mesh["dp"].size())
