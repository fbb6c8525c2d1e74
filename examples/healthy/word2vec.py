"""Skip-gram with negative sampling: rows that no word of a batch uses have no gradient, and Adagrad leaves them."""

import torch
from common import SEED, VOCABULARY, finish, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class SkipGram(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.center, self.context = nn.Embedding(VOCABULARY, dim), nn.Embedding(VOCABULARY, dim)

    def forward(self, center, context, negative):
        v, u, n = self.center(center), self.context(context), self.context(negative)
        good = F.logsigmoid((v * u).sum(-1))
        bad = F.logsigmoid(-(n @ v[..., None]).squeeze(-1)).sum(-1)
        return -(good + bad).mean()


rank, world = setup()
model = DistributedDataParallel(SkipGram())
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
corpus = torch.Generator().manual_seed(1000 * SEED + rank)

for step in range(5):
    center = torch.randint(VOCABULARY, (8,), generator=corpus)
    negative = torch.randint(VOCABULARY, (8, 4), generator=corpus)
    loss = model(center, (center + 1) % VOCABULARY, negative)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
