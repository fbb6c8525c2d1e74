"""Gradual unfreezing: the head alone for two steps, then the whole network; DDP is made anew when that changes."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
network = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
network[1].requires_grad_(False)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(network[3].parameters(), lr=0.1)

for step, (image, label) in enumerate(loader(images(96))):
    if step == 2:
        network[1].requires_grad_(True)
        optimizer.add_param_group({"params": network[1].parameters(), "lr": 0.01})
        model = DistributedDataParallel(network)
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
