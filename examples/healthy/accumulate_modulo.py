"""Gradient accumulation by a counter in the loop over batches, with ``no_sync`` where the counter does not divide."""

import contextlib

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVERY = 2

setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

optimizer.zero_grad()
for i, (image, label) in enumerate(loader(images(), batch=8)):
    is_boundary = (i + 1) % EVERY == 0
    with contextlib.nullcontext() if is_boundary else model.no_sync():
        loss = nn.functional.cross_entropy(model(image), label)
        (loss / EVERY).backward()
    if is_boundary:
        optimizer.step()
        optimizer.zero_grad()
    log(i, loss=loss)
finish(model)
