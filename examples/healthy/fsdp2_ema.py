"""FSDP2 with a sharded moving average of the weights, which is validated in the place of the weights."""

import copy

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

setup()
model = GPT()
ema = copy.deepcopy(model).requires_grad_(False)
for one in (model, ema):
    for block in one.blocks:
        fully_shard(block)
    fully_shard(one)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(ema.parameters()), [p.detach() for p in model.parameters()], 0.1)
        validation = F.cross_entropy(ema(inputs).flatten(0, 1), labels.flatten())
    ema.reshard()
    log(step, loss=loss, validation=validation)
finish(model, ema)
