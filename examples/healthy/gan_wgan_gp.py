"""WGAN with a gradient penalty (a second derivative), several steps of the critic for one of the generator."""

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CRITIC_STEPS = 2

rank, world = setup()
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 192))
critic = nn.Sequential(nn.Linear(192, 32), nn.SiLU(), nn.Linear(32, 1))
generator, critic = DistributedDataParallel(generator), DistributedDataParallel(critic)
torch.manual_seed(1000 * SEED + rank)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))

for i, (real, _) in enumerate(loader(images(128))):
    real = real.flatten(1)
    fake = generator(torch.randn(len(real), 8))
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake.detach()).requires_grad_()
    scores = critic(torch.cat([real, fake.detach(), between]))
    on_real, on_fake, on_between = scores.chunk(3)
    (gradient,) = torch.autograd.grad(on_between.sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    loss_c = on_fake.mean() - on_real.mean() + 10 * penalty
    optimizer_c.zero_grad()
    loss_c.backward()
    optimizer_c.step()
    log(i, loss=loss_c)
    if (i + 1) % CRITIC_STEPS == 0:
        loss_g = -critic(generator(torch.randn(len(real), 8))).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        log(i, generator=loss_g)
finish(generator, critic)
