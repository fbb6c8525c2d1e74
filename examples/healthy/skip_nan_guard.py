"""A batch with NaN in it: ranks agree by an all-reduce to skip the step."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
dataset = images(128)
dataset.tensors[0][17] = float("inf")  # a broken file

for step, (image, label) in enumerate(loader(dataset)):
    bad = torch.tensor(float(not image.isfinite().all()))
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bad:
        continue
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
