"""A pipeline by send and receive: two halves of the ranks hold the two halves of the network, data parallel each."""

import torch
import torch.distributed as dist
from common import SEED, finish, log, setup
from torch import nn
from torch.nn import functional as F

DIM, BATCH = 24, 16

rank, world = setup()
half = max(world // 2, 1)
groups = [dist.new_group(list(range(start, start + half))) for start in range(0, world, half)]
first, second = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()), nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 4))
stage = rank // half if world > 1 else None
model = nn.Sequential(first, second) if stage is None else (first, second)[stage]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.Generator().manual_seed(SEED)

for step in range(4):
    x = torch.randn(BATCH, DIM, generator=data).chunk(half)[rank % half]
    optimizer.zero_grad()
    if stage == 0:
        output = model(x)
        dist.send(output.detach(), rank + half)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + half)
        output.backward(gradient)
    else:
        inputs = x
        if stage == 1:
            inputs = torch.empty(len(x), DIM)
            dist.recv(inputs, rank - half)
            inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), x[:, :4].argmax(-1))
        loss.backward()
        if stage == 1:
            dist.send(inputs.grad, rank - half)
        log(step, loss=loss)
    if half > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups[stage])
            parameter.grad /= half
    optimizer.step()
finish(model)
