"""Sparse gradients of an embedding with SparseAdam beside Adam for the dense parameters, under DDP."""

import torch
from common import VOCABULARY, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(4 * VOCABULARY, dim, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, VOCABULARY))

    def forward(self, tokens):
        return self.mlp(self.embed(tokens))


setup()
model = DistributedDataParallel(Model())
optimizers = [
    torch.optim.SparseAdam(model.module.embed.parameters(), lr=1e-2),
    torch.optim.Adam(model.module.mlp.parameters(), lr=1e-3),
]

for step, (inputs, labels) in enumerate(loader(text())):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    log(step, loss=loss)
finish(model)
