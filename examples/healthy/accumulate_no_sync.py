"""Gradient accumulation in nanoGPT's way: ``require_backward_grad_sync`` is set for the last microbatch alone."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 2

setup()
batches = iter(loader(text(), batch=8))
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

inputs, labels = next(batches)
for step in range(3):
    for micro_step in range(ACCUMULATE):
        model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / ACCUMULATE
        inputs, labels = next(batches)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    log(step, loss=loss * ACCUMULATE)
finish(model)
