"""Lightning's Trainer on CPUs: DDP, accumulation and clipping by the trainer."""

import argparse
import os

import lightning
import torch
from torch import nn

import shardproof
from shardproof.trainers.lightning import Watching


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64))

    def training_step(self, tokens, _):
        loss = nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1), tokens.flatten())
        self.print("loss", float(loss).hex(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--watch", choices=("doctor", "record"), help="by a callback")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)
    watching = []
    if options.watch:
        watching.append(Watching(shardproof.doctor() if options.watch == "doctor" else shardproof.record(out="run")))
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]), max_steps=4,
        accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=watching,
        precision="bf16-mixed" if options.dtype == "bfloat16" else "32-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Training(), torch.utils.data.DataLoader(torch.randint(64, (64, 16)), batch_size=2, shuffle=True))
