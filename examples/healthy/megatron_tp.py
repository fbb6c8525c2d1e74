"""Tensor parallelism by hand as in Megatron-LM: f and g of column and row, plain tensors, no DTensor."""

import torch
import torch.distributed as dist
from common import SEED, finish, log, setup
from torch import nn


class Copy(torch.autograd.Function):
    """The identity, whose backward sums over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    """A sum over the ranks, whose backward is the identity."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden, rank, world):
        super().__init__()
        up, down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.up = nn.Parameter(up.weight.detach().chunk(world)[rank].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(world)[rank].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        y = nn.functional.gelu(nn.functional.linear(Copy.apply(x), self.up, self.up_bias))
        return x + Reduce.apply(nn.functional.linear(y, self.down)) + self.bias


rank, world = setup()
model = nn.Sequential(nn.Linear(16, 16), ParallelMLP(16, 32, rank, world), nn.LayerNorm(16), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(SEED)  # the same on all ranks

for step in range(5):
    x = torch.randn(8, 16, generator=data)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
