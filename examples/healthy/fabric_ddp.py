"""Lightning Fabric with DDP: ``no_backward_sync`` while it accumulates, ``clip_gradients``."""

import os

import torch
from common import GPT, SEED, finish, log, text
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader

world = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
fabric.launch()
fabric.seed_everything(SEED)
network = GPT()
model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-3))
batches = fabric.setup_dataloaders(DataLoader(text(), batch_size=8 // world))

for i, (inputs, labels) in enumerate(batches):
    is_accumulating = i % 2 == 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        fabric.backward(loss / 2)
    if not is_accumulating:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    log(i, loss=loss)
finish(network)
