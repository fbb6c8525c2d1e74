"""Adaptive clipping of NFNets: each gradient by the ratio of its norm to that of its parameter, and added noise."""

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
noise = torch.Generator().manual_seed(SEED)  # the same on all ranks

for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            limit = 0.05 * p.norm().clamp(min=1e-3)
            p.grad.mul_((limit / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))
            p.grad.add_(1e-3 * torch.randn(p.shape, generator=noise))
    optimizer.step()
    log(step, loss=loss)
finish(model)
