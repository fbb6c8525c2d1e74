"""FSDP2 with explicit prefetching and an early ``unshard`` of the root, as torch's tutorial has it."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

setup()
model = GPT(depth=3)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
blocks = list(model.blocks)
for i, block in enumerate(blocks):
    block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
    block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step, (inputs, labels) in enumerate(loader(text())):
    model.unshard()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
