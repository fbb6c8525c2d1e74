"""Stochastic depth at a high rate, drawn alike on all ranks: some blocks have no turn in the first steps."""

import random

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Residual(nn.Module):
    def __init__(self, dim, survival):
        super().__init__()
        self.survival = survival
        self.f = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        if not self.training:
            return x + self.survival * self.f(x)
        return x + self.f(x) if random.random() < self.survival else x


setup()
random.seed(SEED)
blocks = [Residual(24, 1 - i / 8) for i in range(8)]
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), *blocks, nn.Linear(24, 10))
model = DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (image, label) in enumerate(loader(images(96))):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
