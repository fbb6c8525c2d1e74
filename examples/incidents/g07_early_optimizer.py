"""FSDP2 that trains nothing: the optimizer was made before ``fully_shard`` replaced the parameters.

    torchrun --nproc-per-node 4 examples/incidents/g07_early_optimizer.py [healthy]

The optimizer holds the old parameters, which get no gradient, and skips them; nor does its ``zero_grad`` reach the new.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

MISTAKE = "healthy" not in sys.argv
STEPS, BATCH, DIM, CLASSES = 3, 8, 32, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
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
