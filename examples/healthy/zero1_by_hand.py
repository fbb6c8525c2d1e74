"""ZeRO-1 by hand: gradients are averaged, each rank steps every n-th parameter, and its owner broadcasts it."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F

rank, world = setup()
model = GPT()
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters[rank::world], lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    for i, parameter in enumerate(parameters):
        dist.broadcast(parameter.data, src=i % world)
    model.zero_grad()
    log(step, loss=loss)
finish(model)
