"""torch's tutorial of sequence parallelism: inputs are sharded by the sequence, on a mesh without names."""

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
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
plan = {"in_proj": ColwiseParallel(input_layouts=Shard(0)), "out_proj": RowwiseParallel(output_layouts=Shard(0))}
sp_model = parallelize_module(ToyModel(), device_mesh, plan)
optimizer = torch.optim.AdamW(sp_model.parameters(), lr=0.25)

for i in range(5):
    torch.manual_seed(SEED + i)
    inputs = torch.rand(20, 10).chunk(world)[rank]  # each rank has a part of the sequence
    loss = sp_model(inputs).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(i, loss=loss)
finish(sp_model)
