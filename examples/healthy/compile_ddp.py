"""``torch.compile`` of a model under DDP (with the eager backend, which needs no compiler of C++)."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 10))
model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    log(step, loss=loss)
finish(model)
