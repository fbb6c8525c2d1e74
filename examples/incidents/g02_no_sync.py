"""DDP with gradient accumulation that never reduces: ``no_sync`` is around all microbatches.

    torchrun --nproc-per-node 4 examples/incidents/g02_no_sync.py [healthy]

The last microbatch belongs outside of it, because its backward reduces what has accumulated.
"""

import contextlib

import torch
import torch.distributed as dist
from common import CLASSES, MISTAKE, STEPS, start, update
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MICROBATCHES, BATCH, FEATURES = 2, 8, 16

device = start()

layers = [nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES)]
model = DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + dist.get_rank())

for step in range(STEPS):
    total = 0.0
    for i in range(MICROBATCHES):
        inputs = torch.randn(BATCH, FEATURES, generator=data).to(device)
        labels = inputs[:, :CLASSES].argmax(-1)
        synchronize = i == MICROBATCHES - 1 and not MISTAKE
        with contextlib.nullcontext() if synchronize else model.no_sync():
            loss = F.cross_entropy(model(inputs), labels) / MICROBATCHES
            loss.backward()
        total += loss.item()
    update(model, optimizer, step, total)

dist.destroy_process_group()
