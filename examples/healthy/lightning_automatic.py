"""Lightning's Trainer as it comes: DDP, automatic optimization, a sanity check of the validation, a schedule."""

import os

import lightning
import torch
from common import SEED, finish, images, log
from torch import nn
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(),
            nn.Dropout(0.1), nn.Linear(32, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        image, label = batch
        loss = nn.functional.cross_entropy(self.model(image), label)
        self.log("train_loss", loss)
        log(batch_idx, loss=loss)
        return loss

    def validation_step(self, batch, batch_idx):
        image, label = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(image), label), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


world = int(os.environ.get("WORLD_SIZE", "1"))
lightning.seed_everything(SEED)
model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=world, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
training, validation = (DataLoader(images(count), batch_size=16 // world) for count in (64, 32))
trainer.fit(model, training, validation)
finish(model)
