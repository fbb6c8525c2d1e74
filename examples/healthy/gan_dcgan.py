"""The loop of torch's DCGAN example under DDP: real and fake batch for the discriminator, then the generator."""

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
netG = nn.Sequential(
    nn.ConvTranspose2d(8, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, bias=False),
    nn.Sigmoid(),
)
netG = DistributedDataParallel(netG, broadcast_buffers=False)
netD = DistributedDataParallel(netD)
torch.manual_seed(1000 * SEED + rank)
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

for i, (real, _) in enumerate(loader(images())):
    batch_size = real.size(0)
    netD.zero_grad()
    label = torch.full((batch_size,), 1.0)
    errD_real = criterion(netD(real).flatten(), label)
    errD_real.backward()
    fake = netG(torch.randn(batch_size, 8, 1, 1))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).flatten(), label)
    errD_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).flatten(), label)
    errG.backward()
    optimizerG.step()
    log(i, loss=errD_real + errD_fake, generator=errG)
finish(netG, netD)
