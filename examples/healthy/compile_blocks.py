"""Each block compiled by itself before ``fully_shard``, as torchtitan does it."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

setup()
model = GPT()
for block in model.blocks:
    block.compile(backend="aot_eager", fullgraph=True)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
