"""Ranks with different numbers of batches, under DDP's ``join``."""

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(1000 * SEED + rank)

with model.join():
    for step in range(4 + rank):
        x = torch.randn(8, 12, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, loss=loss)
finish(model)
