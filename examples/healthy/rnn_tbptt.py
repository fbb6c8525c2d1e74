"""Truncated backpropagation through time: the state of an LSTM is carried from batch to batch, detached."""

import torch
from common import SEED, VOCABULARY, finish, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(VOCABULARY, dim), nn.LSTM(dim, dim), nn.Linear(dim, VOCABULARY)

    def forward(self, tokens, state):
        output, state = self.lstm(self.embed(tokens), state)
        return self.head(output), state


rank, world = setup()
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
corpus = torch.randint(VOCABULARY, (49, 8 * world), generator=torch.Generator().manual_seed(SEED)).chunk(world, 1)[rank]
state = (torch.zeros(1, 8, 24), torch.zeros(1, 8, 24))

for step, start in enumerate(range(0, 48, 12)):
    state = tuple(one.detach() for one in state)
    logits, state = model(corpus[start : start + 12], state)
    loss = F.cross_entropy(logits.flatten(0, 1), corpus[start + 1 : start + 13].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    log(step, loss=loss)
finish(model)
