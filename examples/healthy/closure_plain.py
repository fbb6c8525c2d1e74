"""One microbatch a step through ``optimizer.step(closure)``, as Lightning's automatic optimization does it."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def training_step(batch):
    image, label = batch
    return nn.functional.cross_entropy(model(image), label)


for step, batch in enumerate(loader(images(96))):

    def closure(batch=batch):
        loss = training_step(batch)
        optimizer.zero_grad()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    log(step, loss=loss)
finish(model)
