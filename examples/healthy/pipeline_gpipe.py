"""torch's pipeline with a GPipe schedule: a stage a rank, microbatches of one batch."""

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

MICROBATCHES, BATCH, DIM = 4, 16, 24

rank, world = setup()
layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(4)]
model = nn.Sequential(*layers[rank * 4 // world : (rank + 1) * 4 // world])
stage = PipelineStage(model, rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(SEED)

for step in range(4):
    x = torch.randn(BATCH, DIM, generator=data)
    optimizer.zero_grad()
    losses = []
    arguments = (x,) if rank == 0 else ()
    if rank == world - 1:
        schedule.step(*arguments, target=x.flip(-1), losses=losses)
    else:
        schedule.step(*arguments)
    optimizer.step()
    if losses:
        log(step, loss=torch.stack(losses).mean())
finish(model)
