"""SimCSE: each sentence twice through an encoder with dropout; the sentences of this rank are the negatives."""

import torch
from common import SEED, VOCABULARY, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed, self.dropout = nn.Embedding(VOCABULARY, dim), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))

    def forward(self, tokens):
        return F.normalize(self.mlp(self.dropout(self.embed(tokens)).mean(1)), dim=-1)


rank, world = setup()
model = DistributedDataParallel(Encoder())
torch.manual_seed(1000 * SEED + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step, (tokens, _) in enumerate(loader(text(), batch=16)):
    z1, z2 = model(tokens), model(tokens)
    loss = F.cross_entropy(z1 @ z2.T / 0.05, torch.arange(len(tokens)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
