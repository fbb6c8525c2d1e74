"""Two microbatches a step, of which the second runs inside of the closure of the optimizer's step."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVERY = 2

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for i, (image, label) in enumerate(loader(images(), batch=8)):

    def closure(image=image, label=label):
        loss = nn.functional.cross_entropy(model(image), label) / EVERY
        loss.backward()
        return loss

    if i % EVERY < EVERY - 1:
        with model.no_sync():
            loss = closure()
    else:
        loss = optimizer.step(closure)
        optimizer.zero_grad()
    log(i, loss=loss)
finish(model)
