"""torch's interleaved 1F1B schedule: two stages a rank, and clipping by the norm of all stages."""

import torch
import torch.distributed as dist
from common import SEED, finish, log, setup
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn import functional as F

MICROBATCHES, BATCH, DIM = 4, 16, 24

rank, world = setup()
layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Tanh()) for _ in range(2 * world)]
mine = [rank, rank + world]
parts = nn.ModuleDict({str(i): layers[i] for i in mine})
stages = [PipelineStage(layers[i], i, 2 * world, torch.device("cpu")) for i in mine]
schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.mse_loss)
optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(SEED)

for step in range(4):
    x = torch.randn(BATCH, DIM, generator=data)
    optimizer.zero_grad()
    losses = []
    is_last = rank == world - 1
    schedule.step(*((x,) if rank == 0 else ()), **({"target": x.sin(), "losses": losses} if is_last else {}))
    square = sum(p.grad.square().sum() for p in parts.parameters())
    dist.all_reduce(square)
    for p in parts.parameters():
        p.grad.mul_((1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    log(step, norm=square.sqrt())
    if losses:
        log(step, loss=torch.stack(losses).mean())
finish(parts)
