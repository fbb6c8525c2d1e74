"""A query and a document encoder, each wrapped by DDP of its own, with one optimizer and one loss."""

import torch
from common import VOCABULARY, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def encoder(dim=24):
    return nn.Sequential(nn.EmbeddingBag(VOCABULARY, dim), nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 12))


setup()
query, document = DistributedDataParallel(encoder()), DistributedDataParallel(encoder())
optimizer = torch.optim.AdamW([*query.parameters(), *document.parameters()], lr=1e-3)

for step, (tokens, _) in enumerate(loader(text())):
    q, d = F.normalize(query(tokens[:, :8]), dim=-1), F.normalize(document(tokens[:, 8:]), dim=-1)
    loss = (1 - (q * d).sum(-1)).mean() + F.relu((q * d.roll(1, 1)).sum(-1) - 0.2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(query, document)
