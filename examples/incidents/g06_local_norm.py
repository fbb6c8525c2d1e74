"""FSDP2 that clips by the norm of each rank's own shards: ``to_local``, and no all-reduce of what is computed from it.

    torchrun --nproc-per-node 4 examples/incidents/g06_local_norm.py [healthy]

Each rank scales its shards by another factor, and by too large a one.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

MISTAKE = "healthy" not in sys.argv
STEPS, BATCH, DIM, CLASSES, MAX_NORM = 3, 8, 32, 10, 0.5


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
for block in model[:2]:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + rank)

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
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

dist.destroy_process_group()
