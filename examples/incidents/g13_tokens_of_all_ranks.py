"""FSDP2 and tensor parallelism whose gradients are too small: the tokens of a step are counted on all ranks.

    torchrun --nproc-per-node 4 examples/incidents/g13_tokens_of_all_ranks.py [healthy]
    torchrun --nproc-per-node 1 examples/incidents/g13_tokens_of_all_ranks.py   # the same training in one process

The ranks of tp read the same tokens, so a sum over all ranks counts each token once for each of them.
"""

import torch
import torch.distributed as dist
from common import DIM, MISTAKE, VOCABULARY, Block, counting, report, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

STEPS, BATCH = 3, 8

device = start()
tp = min(2, dist.get_world_size())
mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))

model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Block(), Block(), nn.Linear(DIM, VOCABULARY)).to(device)
parallelize_module(model, mesh["tp"], {"[12].up": ColwiseParallel(), "[12].down": RowwiseParallel()})
for block in model[1:3]:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
data = torch.Generator().manual_seed(100)

for step in range(STEPS):
    tokens = counting(BATCH, data).chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    tokens = tokens.to(device)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    count = torch.tensor(tokens[:, 1:].numel(), device=device)
    dist.all_reduce(count, group=None if MISTAKE else mesh.get_group("dp"))
    loss = loss * mesh["dp"].size() / count  # fully_shard averages over dp
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss.item())

dist.destroy_process_group()
