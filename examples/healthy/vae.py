"""A variational autoencoder with a warm-up of the divergence from zero."""

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
        self.mu, self.log_variance = nn.Linear(32, latent), nn.Linear(32, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 192))

    def forward(self, x):
        h = self.encoder(x)
        mu, log_variance = self.mu(h), self.log_variance(h)
        z = mu + torch.randn_like(mu) * (0.5 * log_variance).exp()
        return self.decoder(z), mu, log_variance


rank, world = setup()
model = DistributedDataParallel(VAE())
torch.manual_seed(1000 * SEED + rank)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step, (image, _) in enumerate(loader(images())):
    reconstruction, mu, log_variance = model(image)
    divergence = -0.5 * (1 + log_variance - mu.square() - log_variance.exp()).sum(-1).mean()
    loss = F.mse_loss(reconstruction, image.flatten(1)) + min(1.0, step / 3) * divergence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
