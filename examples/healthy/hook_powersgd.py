"""DDP with PowerSGD from the first step on, warm start and error feedback."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel

setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(model)
state = powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (image, label) in enumerate(loader(images(96))):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
