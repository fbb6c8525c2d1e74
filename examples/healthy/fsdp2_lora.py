"""FSDP2 of a frozen network in bfloat16 with trained adapters in float32, each block a unit of its own."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Adapter(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x.bfloat16()).to(x.dtype) + self.up(self.down(x))


setup()
model = GPT().requires_grad_(False)
for block in model.blocks:
    for name in ("qkv", "proj"):
        setattr(block, name, Adapter(getattr(block, name).bfloat16()))
    for name in ("qkv", "proj"):  # one dtype in each group of parameters
        fully_shard(getattr(block, name).linear)
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
