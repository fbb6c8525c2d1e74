"""accelerate's loop: ``prepare``, ``accumulate``, clipping where gradients are synchronized, a scheduler."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import GPT, SEED, finish, log, text
from torch.nn import functional as F
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(SEED)
network = GPT()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
warmup = 3 * accelerator.num_processes  # accelerate's scheduler steps once for each process
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warmup))
batches = DataLoader(text(), batch_size=8 // accelerator.num_processes)
model, optimizer, batches, scheduler = accelerator.prepare(network, optimizer, batches, scheduler)

for i, (inputs, labels) in enumerate(batches):
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    log(i, loss=loss)
finish(network)
