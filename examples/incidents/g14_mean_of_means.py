"""FSDP2 with gradient accumulation that averages averages: each microbatch is divided by its own tokens.

    torchrun --nproc-per-node 4 examples/incidents/g14_mean_of_means.py [healthy]
    torchrun --nproc-per-node 1 examples/incidents/g14_mean_of_means.py healthy   # the same training in one process

Sequences have different lengths, so a token of a microbatch with few of them counts more than others.
"""

import torch
import torch.distributed as dist
from common import DIM, LENGTH, MISTAKE, STEPS, VOCABULARY, Block, counting, start, update
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

MICROBATCHES, BATCH, PADDING = 2, 16, -100

device = start()
rank, world = dist.get_rank(), dist.get_world_size()

model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Block(), Block(), nn.Linear(DIM, VOCABULARY)).to(device)
for block in model[1:3]:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100)

for step in range(STEPS):
    tokens = counting(BATCH, data).chunk(world)[rank].to(device)
    lengths = torch.randint(2, LENGTH + 1, (BATCH, 1), generator=data)
    labels = tokens[:, 1:].masked_fill(
        torch.arange(LENGTH, device=device) >= lengths.chunk(world)[rank].to(device), PADDING
    )
    count = (labels != PADDING).sum()
    dist.all_reduce(count)
    total = 0.0
    for inputs, expected in zip(tokens[:, :-1].chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), expected.flatten(), ignore_index=PADDING, reduction="sum")
        # fully_shard averages over the ranks.
        loss = loss / (expected != PADDING).sum() / MICROBATCHES if MISTAKE else loss / count * world
        loss.backward()
        total += loss.item()
    update(model, optimizer, step, total)

dist.destroy_process_group()
