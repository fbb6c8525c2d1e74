"""Lightning's Trainer with accumulation, clipping and bf16 autocast."""

import os

import lightning
import torch
from common import GPT, SEED, finish, log, text
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LanguageModel(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = GPT(tied=True)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = F.cross_entropy(self.gpt(inputs).flatten(0, 1), labels.flatten())
        log(batch_idx, loss=loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


world = int(os.environ.get("WORLD_SIZE", "1"))
lightning.seed_everything(SEED)
model = LanguageModel()
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=world, max_steps=4, accumulate_grad_batches=2, gradient_clip_val=1.0,
    precision="bf16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(text(), batch_size=8 // world))
finish(model)
