"""The first rank reads each batch and scatters it; the model is DDP's."""

import torch
import torch.distributed as dist
from common import finish, images, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rank, world = setup()
batches = iter(DataLoader(images(), batch_size=16)) if rank == 0 else None
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(4):
    image, label = torch.empty(16 // world, 3, 8, 8), torch.empty(16 // world, dtype=torch.long)
    parts = [list(one.chunk(world)) for one in next(batches)] if rank == 0 else [None, None]
    dist.scatter(image, parts[0])
    dist.scatter(label, parts[1])
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
