"""FSDP2 with gradient accumulation that forgets: ``zero_grad`` is at the top of the microbatch loop.

    torchrun --nproc-per-node 4 examples/incidents/g04_zero_grad.py [healthy]

The optimizer sees the gradients of the last of the four microbatches only.
"""

import torch
import torch.distributed as dist
from common import DIM, MISTAKE, Block, report, start
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

STEPS, MICROBATCHES, BATCH, CLASSES = 3, 4, 8, 10

device = start()

model = nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES)).to(device)
for block in model[:2]:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + dist.get_rank())

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
    report(step, total)

dist.destroy_process_group()
