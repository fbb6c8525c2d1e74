"""Lightning's GAN example: manual optimization of two optimizers with ``toggle_optimizer``, under DDP."""

import os

import lightning
import torch
from common import SEED, finish, images, log
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class GAN(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 192), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(192, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def on_fit_start(self):
        torch.manual_seed(1000 * SEED + self.global_rank)  # the noise differs between ranks

    def adversarial(self, images, real):
        logits = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        real = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(real), 8)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial(self.generator(z), True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        fake = self.generator(z).detach()
        d_loss = (self.adversarial(real, True) + self.adversarial(fake, False)) / 2
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        log(batch_idx, loss=d_loss, generator=g_loss)

    def configure_optimizers(self):
        return [torch.optim.Adam(one.parameters(), lr=2e-4) for one in (self.generator, self.discriminator)]


world = int(os.environ.get("WORLD_SIZE", "1"))
lightning.seed_everything(SEED)
model = GAN()
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp_find_unused_parameters_true", devices=world, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(images(), batch_size=16 // world))
finish(model)
