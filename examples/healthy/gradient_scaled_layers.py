"""The gradient of the embedding is shrunk to a tenth in the forward, as GLM-130B did against spikes of the loss."""

import torch
from common import VOCABULARY, Block, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Shrunk(nn.Module):
    def __init__(self, dim=32, alpha=0.1):
        super().__init__()
        self.alpha = alpha
        self.embed, self.block, self.head = (
            nn.Embedding(VOCABULARY, dim),
            Block(dim, 4, 0.0),
            nn.Linear(dim, VOCABULARY),
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x * self.alpha + x.detach() * (1 - self.alpha)
        return self.head(self.block(x))


setup()
model = DistributedDataParallel(Shrunk())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
