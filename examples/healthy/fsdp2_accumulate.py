"""FSDP2 with gradient accumulation: ``set_requires_gradient_sync`` and ``set_is_last_backward`` by microbatch."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

MICROBATCHES = 2

setup()
model = GPT()
for block in model.blocks:
    fully_shard(block, reshard_after_forward=False)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = list(loader(text(), batch=8))

for step in range(len(batches) // MICROBATCHES):
    total = 0.0
    for i, (inputs, labels) in enumerate(batches[step * MICROBATCHES : (step + 1) * MICROBATCHES]):
        is_last = i == MICROBATCHES - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / MICROBATCHES
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=total)
finish(model)
