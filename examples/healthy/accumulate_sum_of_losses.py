"""Gradient accumulation by adding the losses of the microbatches: one backward for all of them."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.SiLU(), nn.Linear(32, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = list(loader(images(), batch=8))

for step in range(len(batches) // 2):
    losses = [nn.functional.cross_entropy(model(image), label) for image, label in batches[2 * step : 2 * step + 2]]
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
