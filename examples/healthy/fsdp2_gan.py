"""Two roots: a generator and a discriminator, each sharded by FSDP2; one training step for each in a batch."""

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

rank, world = setup()
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 192))
discriminator = nn.Sequential(nn.Linear(192, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
for model in (generator, discriminator):
    fully_shard(model[0])
    fully_shard(model)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
noise = torch.Generator().manual_seed(1000 * SEED + rank)

for step, (real, _) in enumerate(loader(images())):
    real, z = real.flatten(1), torch.randn(len(real), 8, generator=noise)
    with torch.no_grad():
        fake = generator(z)
    optimizer_d.zero_grad()
    loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
    loss_d.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = F.softplus(-discriminator(generator(z))).mean()
    loss_g.backward()
    optimizer_g.step()
    log(step, loss=loss_d, generator=loss_g)
finish(generator, discriminator)
