"""Prompt tuning: a frozen model, and a few trained vectors in front of the embedded tokens."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Prompted(nn.Module):
    def __init__(self, gpt, length=4):
        super().__init__()
        self.gpt = gpt.requires_grad_(False)
        self.prompt = nn.Parameter(gpt.embed.weight[:length].clone())

    def forward(self, tokens):
        gpt = self.gpt
        x = torch.cat([self.prompt.expand(len(tokens), -1, -1), gpt.embed(tokens)], 1)
        x = x + gpt.position(torch.arange(x.shape[1]))
        for block in gpt.blocks:
            x = block(x)
        return gpt.head(gpt.norm(x[:, len(self.prompt) :]))


setup()
model = DistributedDataParallel(Prompted(GPT()))
optimizer = torch.optim.AdamW([model.module.prompt], lr=0.05)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
