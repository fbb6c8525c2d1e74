"""Parameter averaging after each step, in the place of a reduction of gradients: with SGD it is the same."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn

rank, world = setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step, (image, label) in enumerate(loader(images())):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter /= world
    log(step, loss=loss)
finish(model)
