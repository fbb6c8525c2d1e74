"""MoCo: a key encoder that follows by momentum, and a queue of keys of all ranks without gradients."""

import copy

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class MoCo(nn.Module):
    def __init__(self, dim=16, size=64, momentum=0.99):
        super().__init__()
        self.momentum = momentum
        self.query = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, dim))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, dim), dim=-1))

    def forward(self, one, other):
        q = F.normalize(self.query(one), dim=-1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(self.momentum).add_(fast, alpha=1 - self.momentum)
            k = F.normalize(self.key(other), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1) / 0.1
        with torch.no_grad():
            keys = [torch.empty_like(k) for _ in range(dist.get_world_size())]
            dist.all_gather(keys, k)
            self.queue.copy_(torch.cat([*keys, self.queue])[: len(self.queue)])
        return logits


setup()
model = DistributedDataParallel(MoCo())
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

for step, (image, _) in enumerate(loader(images())):
    logits = model(image, image.flip(-1))
    loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
