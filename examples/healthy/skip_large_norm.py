"""A step is skipped on all ranks where the norm of the gradients is above a limit."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images(128))):
    if step == 1:
        image = 30 * image  # a bad batch
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 5:
        optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss, norm=norm)
finish(model)
