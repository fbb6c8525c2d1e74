"""DLRM's hybrid: tables of embeddings on one rank each with an all-to-all of their rows, the rest data parallel."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed
from common import SEED, finish, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TABLES, ROWS, DIM, BATCH = 4, 32, 8, 16

rank, world = setup()
tables = [nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(TABLES)]
mine = nn.ModuleList(tables[rank * TABLES // world : (rank + 1) * TABLES // world])
top = DistributedDataParallel(nn.Sequential(nn.Linear(DIM * TABLES + 4, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD([{"params": mine.parameters(), "lr": 0.5 / world}, {"params": top.parameters()}], lr=0.1)
data = torch.Generator().manual_seed(SEED)

for step in range(4):
    dense = torch.randn(BATCH, 4, generator=data)
    sparse = torch.randint(ROWS, (TABLES, BATCH, 3), generator=data)
    first = rank * len(mine)
    # The tables of this rank for the batch of all ranks; then all tables for the batch of this rank.
    rows = torch.stack([table(sparse[first + i]) for i, table in enumerate(mine)])
    parts = [part.contiguous() for part in rows.chunk(world, 1)]
    received = [torch.empty_like(parts[0]) for _ in range(world)]
    features = torch.cat(distributed.all_to_all(received, parts)).transpose(0, 1).flatten(1)
    mine_of_batch = dense.chunk(world)[rank]
    label = (sparse.sum((0, 2)) % 2).to(dense.dtype).chunk(world)[rank]
    output = top(torch.cat([features, mine_of_batch], 1)).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(output, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
dist.barrier()
finish(mine, top)
