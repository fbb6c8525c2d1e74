"""Data parallelism by hand whose gradients are a step late: it waits for the reduction in the other of two buffers.

    torchrun --nproc-per-node 4 examples/incidents/g15_stale_reduction.py [healthy]
    torchrun --nproc-per-node 1 examples/incidents/g15_stale_reduction.py healthy   # the same training in one process

Two buffers let a reduction run while the next step fills the other one; then the step must use the one that it filled.
"""

import torch
import torch.distributed as dist
from common import MISTAKE, report, start
from torch import nn
from torch.nn import functional as F

STEPS, BATCH, FEATURES, CLASSES = 3, 16, 16, 10

device = start()
rank, world = dist.get_rank(), dist.get_world_size()

layers = [nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES)]
model = nn.Sequential(*layers).to(device)
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
buffers = [torch.zeros(sum(p.numel() for p in parameters), device=device) for _ in range(2)]
works = [None, None]
data = torch.Generator().manual_seed(100)

for step in range(STEPS):
    inputs = torch.randn(BATCH, FEATURES, generator=data).chunk(world)[rank].to(device)
    labels = inputs[:, :CLASSES].argmax(-1)
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    filled = step % 2
    torch.cat([p.grad.flatten() for p in parameters], out=buffers[filled])
    works[filled] = dist.all_reduce(buffers[filled], async_op=True)
    ready = 1 - filled if MISTAKE and step > 0 else filled
    works[ready].wait()
    for p, part in zip(parameters, buffers[ready].split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p) / world)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss.item())

dist.destroy_process_group()
