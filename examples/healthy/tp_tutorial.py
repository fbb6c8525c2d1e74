"""torch's tutorial of tensor parallelism: a feed-forward network by column and row on a mesh without names."""

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 8)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


rank, world = setup()
device_mesh = init_device_mesh("cpu", (world,))
tp_model = parallelize_module(ToyModel(), device_mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=0.25)

for i in range(5):
    torch.manual_seed(SEED + i)  # inputs are the same on all ranks of a tensor-parallel group
    loss = tp_model(torch.rand(20, 10)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(i, loss=loss)
finish(tp_model)
