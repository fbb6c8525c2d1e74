"""Local SGD: ranks train by themselves and average their parameters after every second step."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn

PERIOD = 2

rank, world = setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step, (image, label) in enumerate(loader(images(96))):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    if (step + 1) % PERIOD == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= world
    log(step, loss=loss)
finish(model)
