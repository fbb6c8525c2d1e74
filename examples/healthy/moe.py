"""A mixture of experts under DDP with top-1 routing and an auxiliary loss: some experts get no token at times."""

import torch
from common import VOCABULARY, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class MoE(nn.Module):
    def __init__(self, dim, experts=4):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        weight, chosen = scores.max(-1)
        output = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            index = (chosen == i).nonzero().squeeze(1)
            output = output.index_add(0, index, weight[index, None] * expert(tokens[index]))
        share = F.one_hot(chosen, len(self.experts)).to(scores.dtype).mean(0)
        return x + output.view_as(x), len(self.experts) * (share * scores.mean(0)).sum()


class Model(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.moe = nn.Embedding(VOCABULARY, dim), MoE(dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        x, balance = self.moe(self.embed(tokens))
        return self.head(self.norm(x)), balance


setup()
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    logits, balance = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
