"""Gradient accumulation in the simplest way: DDP reduces after each microbatch, which costs time and is right."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.GELU(), nn.Linear(24, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
accumulation_steps = 4

for i, (image, label) in enumerate(loader(images(128), batch=8)):
    loss = nn.functional.cross_entropy(model(image), label) / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    log(i, loss=loss)
finish(model)
