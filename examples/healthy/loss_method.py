"""A model that is called by a method of its own and never by ``forward``; gradients are averaged by hand."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def loss(self, image, label):
        return nn.functional.cross_entropy(self.head(self.features(image)), label)


rank, world = setup()
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    loss = model.loss(image, label)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    log(step, loss=loss)
finish(model)
