"""torch's ZeroRedundancyOptimizer: each rank has the states of its parameters, and broadcasts them after its step."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

setup()
layers = [layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.ReLU())]
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 48), *layers, nn.Linear(48, 10)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
