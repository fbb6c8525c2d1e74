"""FSDP2 that trains nothing: the optimizer was made before ``fully_shard`` replaced the parameters.

    torchrun --nproc-per-node 4 examples/incidents/g07_early_optimizer.py [healthy]

The optimizer holds the old parameters, which get no gradient, and skips them; nor does its ``zero_grad`` reach the new.
"""

import torch
import torch.distributed as dist
from common import CLASSES, DIM, MISTAKE, Block, classify, start
from torch import nn
from torch.distributed.fsdp import fully_shard

device = start()

model = nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES)).to(device)
if MISTAKE:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for block in model[:2]:
    fully_shard(block)
fully_shard(model)
if not MISTAKE:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + dist.get_rank())

classify(model, optimizer, data)
