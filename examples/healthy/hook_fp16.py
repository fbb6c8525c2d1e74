"""DDP's ``fp16_compress_hook``."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
model.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (image, label) in enumerate(loader(images())):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
