"""QLoRA: a base of int8 weights in buffers, which are dequantized in the forward, and trained adapters."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class QuantizedLinear(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("quantized", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach().clone())
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        base = F.linear(x, self.quantized * self.scale, self.bias)
        return base + F.linear(F.linear(F.dropout(x, 0.0), self.lora_a), self.lora_b)


setup()
model = GPT().requires_grad_(False)
for block in model.blocks:
    block.qkv, block.up = QuantizedLinear(block.qkv), QuantizedLinear(block.up)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
