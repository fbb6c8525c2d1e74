"""FSDP2 and sequence parallelism with norms that drift apart: the gradients of plain LayerNorms are not summed over tp.

    torchrun --nproc-per-node 4 examples/incidents/g09_sequence_parallel_norm.py [healthy]

Between the linear layers each rank of tp holds its part of the sequence, so its norms see that part only. The plan
names no norm (``SequenceParallel()`` would make them DTensors), so their gradients need an all-reduce over tp.
"""

import torch
import torch.distributed as dist
from common import DIM, MISTAKE, VOCABULARY, Block, counting, report, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

STEPS, BATCH = 3, 4

device = start()
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))

model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Block(), Block(), nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY))
model.to(device)
plan = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "[12].up": ColwiseParallel(input_layouts=Shard(1)),
    "[12].down": RowwiseParallel(output_layouts=Shard(1)),
    "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
parallelize_module(model, mesh["tp"], plan)
for block in model[1:3]:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
data = torch.Generator().manual_seed(100 + mesh.get_local_rank("dp"))

for step in range(STEPS):
    tokens = counting(BATCH, data).to(device)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norms = [p for p in model.parameters() if p.device_mesh.ndim == 1]
    linears = [p for p in model.parameters() if p.device_mesh.ndim == 2]
    if not MISTAKE:
        for p in norms:
            dist.all_reduce(p.grad.to_local(), group=mesh.get_group("tp"))
    # clip_grad_norm_ refuses gradients of two meshes.
    parts = [get_total_norm([p.grad for p in group]).full_tensor() for group in (norms, linears)]
    for group in (norms, linears):
        clip_grads_with_norm_(group, max_norm=1.0, total_norm=torch.stack(parts).norm())
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss.item())

dist.destroy_process_group()
