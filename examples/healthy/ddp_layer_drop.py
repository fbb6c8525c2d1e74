"""LayerDrop: each block of a transformer is left out at random, of the many that it has; each rank draws for itself."""

import torch
from common import LENGTH, SEED, VOCABULARY, Block, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class LayerDropGPT(nn.Module):
    def __init__(self, dim=16, depth=6, rate=0.5):
        super().__init__()
        self.rate, self.draw = rate, torch.Generator()
        self.embed, self.position = nn.Embedding(VOCABULARY, dim), nn.Parameter(torch.zeros(LENGTH, dim))
        self.blocks = nn.ModuleList(Block(dim, 2, 0.0) for _ in range(depth))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            if not self.training or torch.rand((), generator=self.draw) >= self.rate:
                x = block(x)
        return self.head(x)


rank, world = setup()
model = LayerDropGPT()
model.draw.manual_seed(1000 * SEED + rank)
model = DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text(96))):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
