"""Stochastic weight averaging by ``torch.optim.swa_utils``, and new statistics of BatchNorm at the end."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

setup()
network = nn.Sequential(
    nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
swa_model, swa_scheduler = AveragedModel(network), SWALR(optimizer, swa_lr=0.02)
batches = loader(images(96))

for step, (image, label) in enumerate(batches):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    if step >= 1:
        swa_model.update_parameters(network)
        swa_scheduler.step()
    log(step, loss=loss)
update_bn(batches, swa_model)
finish(model, swa_model)
