"""HSDP whose replicas are never reduced: ``fully_shard`` gets the shard dimension of the mesh instead of the mesh.

    torchrun --nproc-per-node 4 examples/incidents/g03_sub_mesh.py [healthy]

With a mesh of one dimension it is plain FSDP, once in each replica: two trainings that know nothing of each other.
"""

import torch
import torch.distributed as dist
from common import CLASSES, DIM, MISTAKE, Block, classify, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

device = start()
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))

model = nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES)).to(device)
data_mesh = mesh["shard"] if MISTAKE else mesh
for block in model[:2]:
    fully_shard(block, mesh=data_mesh)
fully_shard(model, mesh=data_mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + dist.get_rank())

classify(model, optimizer, data)
