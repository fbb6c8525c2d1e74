"""FSDP2 with gradient accumulation that forgets: ``zero_grad`` is at the top of the microbatch loop.

    torchrun --nproc-per-node 4 examples/incidents/g04_zero_grad.py [healthy]

The optimizer sees the gradients of the last of the four microbatches only.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

MISTAKE = "healthy" not in sys.argv
STEPS, MICROBATCHES, BATCH, DIM, CLASSES = 3, 4, 8, 32, 10


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
    total = 0.0
    for i in range(MICROBATCHES):
        if MISTAKE or i == 0:
            optimizer.zero_grad()
        inputs = torch.randn(BATCH, DIM, generator=data).to(device)
        labels = inputs[:, :CLASSES].argmax(-1)
        loss = F.cross_entropy(model(inputs), labels) / MICROBATCHES
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {total:.4f}", flush=True)

dist.destroy_process_group()
