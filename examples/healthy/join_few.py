"""Epochs under DDP's ``join`` in which ranks have few batches, and one fewer than another."""

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without states, which a rank that ends early would lack
data = torch.Generator().manual_seed(1000 * SEED + rank)

for epoch in range(3):
    with model.join():
        for step in range(2 + rank % 2):
            x = torch.randn(8, 12, generator=data)
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(3 * epoch + step, loss=loss)
finish(model)
