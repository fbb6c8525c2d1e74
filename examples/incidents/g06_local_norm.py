"""FSDP2 that clips by the norm of each rank's own shards: ``to_local``, and no all-reduce of what is computed from it.

    torchrun --nproc-per-node 4 examples/incidents/g06_local_norm.py [healthy]

Each rank scales its shards by another factor, and by too large a one.
"""

import torch
import torch.distributed as dist
from common import DIM, MISTAKE, Block, report, start
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

STEPS, BATCH, CLASSES, MAX_NORM = 3, 8, 10, 0.5

device = start()

model = nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES)).to(device)
for block in model[:2]:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + dist.get_rank())

for step in range(STEPS):
    inputs = torch.randn(BATCH, DIM, generator=data).to(device)
    labels = inputs[:, :CLASSES].argmax(-1)
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    grads = [p.grad.to_local() for p in model.parameters()]
    norm = get_total_norm(grads)
    if not MISTAKE:
        squares = norm.square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
    for grad in grads:
        grad.mul_(min(1.0, MAX_NORM / norm))
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss.item())

dist.destroy_process_group()
