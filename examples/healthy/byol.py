"""BYOL: two views through the online network, and through a target that follows it and has no gradients."""

import copy

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 16))
target = copy.deepcopy(encoder).requires_grad_(False)
predictor = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
online = DistributedDataParallel(nn.Sequential(encoder, predictor))
optimizer = torch.optim.SGD(online.parameters(), lr=0.1, momentum=0.9)
noise = torch.Generator().manual_seed(1000 * SEED + rank)

for step, (image, _) in enumerate(loader(images())):
    one, other = (image + 0.2 * torch.randn(image.shape, generator=noise) for _ in range(2))
    with torch.no_grad():
        goal_one, goal_other = target(one), target(other)
    loss = -F.cosine_similarity(online(one), goal_other).mean() - F.cosine_similarity(online(other), goal_one).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), encoder.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
    log(step, loss=loss)
finish(online, target)
