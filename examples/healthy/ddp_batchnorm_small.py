"""A network of linear layers with BatchNorm1d after each: the first program of many."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = nn.Sequential(
    nn.Flatten(), nn.Linear(192, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(),
    nn.Linear(16, 10),
)  # fmt: skip
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

model.train()
for step, (image, label) in enumerate(loader(images())):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
