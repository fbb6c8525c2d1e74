"""FSDP1 in HYBRID_SHARD over a mesh of replicas and shards."""

import torch
from common import GPT, Block, finish, loader, log, setup, text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

rank, world = setup()
shards = min(world, 2)  # FSDP1 reduces nothing over replicas of one shard each
mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))
model = FSDP(
    GPT(),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    device_mesh=mesh,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
