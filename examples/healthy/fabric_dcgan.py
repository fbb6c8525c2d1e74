"""Fabric's DCGAN example: the discriminator's gradients of the generator's backward are zeroed a step later."""

import os

import torch
from common import SEED, finish, images, log
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

world = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
fabric.launch()
fabric.seed_everything(SEED)
generator = nn.Sequential(
    nn.ConvTranspose2d(8, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
    nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten(0), nn.Sigmoid()
)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
discriminator, optimizer_d = fabric.setup(discriminator, optimizer_d)
generator, optimizer_g = fabric.setup(generator, optimizer_g)
dataloader = fabric.setup_dataloaders(DataLoader(images(), batch_size=16 // world))
criterion = nn.BCELoss()
torch.manual_seed(1000 * SEED + fabric.global_rank)  # the noise differs between ranks

for i, (real, _) in enumerate(dataloader):
    discriminator.zero_grad()
    output = discriminator(real)
    err_d_real = criterion(output, torch.ones_like(output))
    fabric.backward(err_d_real)
    fake = generator(torch.randn(len(real), 8, 1, 1))
    output = discriminator(fake.detach())
    err_d_fake = criterion(output, torch.zeros_like(output))
    fabric.backward(err_d_fake)
    optimizer_d.step()

    generator.zero_grad()
    output = discriminator(fake)
    err_g = criterion(output, torch.ones_like(output))
    fabric.backward(err_g)
    optimizer_g.step()
    log(i, loss=err_d_real + err_d_fake, generator=err_g)
finish(generator, discriminator)
