"""MAML by ``torch.func``: inner steps with ``grad``, all tasks of a rank at once with ``vmap``."""

import torch
import torch.distributed as dist
from common import SEED, finish, log, setup
from torch import nn
from torch.func import functional_call, grad, vmap

TASKS, SHOTS = 4, 8

rank, world = setup()
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(1000 * SEED + rank)


def task_loss(weights, x, y):
    return (functional_call(model, weights, (x,)) - y).square().mean()


def outer_loss(weights, x, y):
    for _ in range(2):
        gradients = grad(task_loss)(weights, x[:SHOTS], y[:SHOTS])
        weights = {name: w - 0.05 * gradients[name] for name, w in weights.items()}
    return task_loss(weights, x[SHOTS:], y[SHOTS:])


for step in range(4):
    phase, amplitude = torch.rand(2, TASKS, 1, 1, generator=data)
    x = torch.rand(TASKS, 2 * SHOTS, 1, generator=data) * 6 - 3
    y = (amplitude + 0.5) * torch.sin(x + 3 * phase)
    loss = vmap(outer_loss, in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y).mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    log(step, loss=loss)
finish(model)
