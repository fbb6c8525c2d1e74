"""Two heads of which each batch trains one, under ``find_unused_parameters``; all ranks draw the same head."""

import random

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"class": nn.Linear(32, 10), "brightness": nn.Linear(32, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


setup()
model = DistributedDataParallel(MultiTask(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tasks = random.Random(SEED)

for step, (image, label) in enumerate(loader(images(96))):
    task = tasks.choice(["class", "brightness"])
    output = model(image, task)
    if task == "class":
        loss = nn.functional.cross_entropy(output, label)
    else:
        loss = nn.functional.mse_loss(output.squeeze(1), image.mean((1, 2, 3)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
