"""A denoising diffusion model: random timesteps and noise on each rank, EMA, zero-initialized last layer."""

import copy

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TIMESTEPS = 100


class Denoiser(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, dim)
        self.inputs, self.hidden, self.output = nn.Linear(192, dim), nn.Linear(dim, dim), nn.Linear(dim, 192)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, x, t):
        h = F.silu(self.inputs(x.flatten(1)) + self.time(t))
        return self.output(h + F.silu(self.hidden(h))).view_as(x)


rank, world = setup()
network = Denoiser()
ema = copy.deepcopy(network).requires_grad_(False)
model = DistributedDataParallel(network)
torch.manual_seed(1000 * SEED + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMESTEPS), 0)

for step, (image, _) in enumerate(loader(images())):
    t = torch.randint(TIMESTEPS, (len(image),))
    noise, alpha = torch.randn_like(image), alphas[t, None, None, None]
    loss = F.mse_loss(model(alpha.sqrt() * image + (1 - alpha).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
    log(step, loss=loss)
finish(model, ema)
