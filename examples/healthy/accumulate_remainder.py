"""Accumulation over an epoch whose last step has fewer microbatches than the others, and is made all the same."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVERY = 3

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = list(loader(images(), batch=8))

for i, (image, label) in enumerate(batches):
    window = min(EVERY, len(batches) - i // EVERY * EVERY)
    loss = nn.functional.cross_entropy(model(image), label)
    (loss / window).backward()
    if (i + 1) % EVERY == 0 or i + 1 == len(batches):
        optimizer.step()
        optimizer.zero_grad()
    log(i, loss=loss)
finish(model)
