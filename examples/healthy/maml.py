"""MAML with ``functional_call``: an inner step on the support set of each task, the outer loss through it."""

import torch
import torch.distributed as dist
from common import SEED, finish, log, setup
from torch import nn
from torch.func import functional_call

TASKS, SHOTS = 2, 8

rank, world = setup()
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(1000 * SEED + rank)

for step in range(4):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(TASKS):
        phase, amplitude = torch.rand(2, generator=data)
        x = torch.rand(2 * SHOTS, 1, generator=data) * 6 - 3
        y = (amplitude + 0.5) * torch.sin(x + 3 * phase)
        weights = dict(model.named_parameters())
        support = (functional_call(model, weights, (x[:SHOTS],)) - y[:SHOTS]).square().mean()
        gradients = torch.autograd.grad(support, list(weights.values()), create_graph=True)
        fast = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        total = total + (functional_call(model, fast, (x[SHOTS:],)) - y[SHOTS:]).square().mean()
    (total / TASKS).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    log(step, loss=total / TASKS)
finish(model)
