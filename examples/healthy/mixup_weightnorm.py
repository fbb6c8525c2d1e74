"""Mixup and label smoothing with weight and spectral normalization, RMSprop and a one-cycle schedule."""

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

rank, world = setup()
model = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(192, 32)), nn.ReLU(), spectral_norm(nn.Linear(32, 10)))
model = DistributedDataParallel(model)
torch.manual_seed(1000 * SEED + rank)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

for step, (image, label) in enumerate(loader(images())):
    share, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(image))
    output = model(share * image + (1 - share) * image[order])
    loss = share * criterion(output, label) + (1 - share) * criterion(output, label[order])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    log(step, loss=loss)
finish(model)
