"""Fine-tuning of a new head on a frozen network with BatchNorm in eval mode; the optimizer has the head alone."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
backbone.requires_grad_(False)
model = nn.Sequential(backbone, nn.Linear(32, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.module[1].parameters(), lr=1e-2)

model.train()
backbone.eval()
for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
