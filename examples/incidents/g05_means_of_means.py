"""FSDP2: the loss of each rank is the mean over its own tokens, and ranks have different numbers of them.

    shardproof check --model g05_means_of_means.py:model --parallelize g05_means_of_means.py:parallelize \
        --data g05_means_of_means.py:data --step g05_means_of_means.py:step --mesh dp=4

A token of a rank with few of them counts more. ``healthy`` divides by the tokens of all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

BATCH, LENGTH, DIM, VOCABULARY = 2, 16, 16, 32


def model():
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, VOCABULARY))


def parallelize(model, mesh):
    fully_shard(model[1], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def data(step, rank):
    made = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=made)
    labels = tokens[:, 1:].clone()
    labels[:, 12 - 3 * rank :] = -100  # padding
    return [(tokens[:, :-1], labels)]


def train(model, optimizer, microbatches, count):
    for tokens, labels in microbatches:
        losses = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (losses / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def own_tokens(microbatches, mesh):
    return torch.tensor(sum(int((labels >= 0).sum()) for _, labels in microbatches), device=mesh.device_type)


def step(model, optimizer, microbatches, mesh):
    train(model, optimizer, microbatches, own_tokens(microbatches, mesh))


def healthy(model, optimizer, microbatches, mesh):
    count = own_tokens(microbatches, mesh)
    dist.all_reduce(count, group=mesh["dp"].get_group())
    train(model, optimizer, microbatches, count / mesh["dp"].size())
