"""LoRA: the second matrix starts at zero, so the first has no gradient in the first step."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class LoRALinear(nn.Module):
    def __init__(self, linear, rank=4, alpha=8):
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


setup()
network = GPT().requires_grad_(False)
for block in network.blocks:
    for name in ("qkv", "proj", "up", "down"):
        setattr(block, name, LoRALinear(getattr(block, name)))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
