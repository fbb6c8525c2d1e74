"""FSDP2 that trains nothing: the optimizer was made before ``fully_shard`` replaced the parameters.

    torchrun --nproc-per-node 4 examples/incidents/g07_early_optimizer.py [healthy]

The optimizer holds the old parameters, which get no gradient, and skips them; nor does its ``zero_grad`` reach the new.
"""

import torch
import torch.distributed as dist
from common import DIM, MISTAKE, Block, start
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

STEPS, BATCH, CLASSES = 3, 8, 10

device = start()
rank = dist.get_rank()

model = nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES)).to(device)
if MISTAKE:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for block in model[:2]:
    fully_shard(block)
fully_shard(model)
if not MISTAKE:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + rank)

for step in range(STEPS):
    inputs = torch.randn(BATCH, DIM, generator=data).to(device)
    labels = inputs[:, :CLASSES].argmax(-1)
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

dist.destroy_process_group()
