"""Data parallelism without a wrapper: after backward an all-reduce of each gradient, as in torch's tutorial."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


setup()
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout2d(0.0), nn.Flatten(), nn.Linear(288, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

for step, (image, label) in enumerate(loader(images())):
    optimizer.zero_grad()
    loss = nn.functional.nll_loss(model(image).log_softmax(-1), label)
    loss.backward()
    average_gradients(model)
    optimizer.step()
    log(step, loss=loss)
finish(model)
