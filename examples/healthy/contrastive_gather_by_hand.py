"""SimCLR with an autograd function of its own for the gather: its backward sums the gradients of all ranks."""

import torch
import torch.distributed as dist
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gathered = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, x.contiguous())
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *gradients):
        gradients = torch.stack(gradients)
        dist.all_reduce(gradients)
        return gradients[dist.get_rank()]


rank, world = setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 16))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
noise = torch.Generator().manual_seed(1000 * SEED + rank)

for step, (image, _) in enumerate(loader(images())):
    views = torch.cat([image + 0.3 * torch.randn(image.shape, generator=noise) for _ in range(2)])
    z1, z2 = F.normalize(model(views), dim=-1).chunk(2)
    z1, z2 = torch.cat(GatherLayer.apply(z1)), torch.cat(GatherLayer.apply(z2))
    z = torch.cat([z1, z2])
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    loss = F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z1)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
