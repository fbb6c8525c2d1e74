"""Gradient checkpointing without reentrance over blocks with dropout: recomputation draws the same numbers."""

import torch
from common import GPT, SEED, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Checkpointed(GPT):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


rank, world = setup()
model = DistributedDataParallel(Checkpointed(dropout=0.1))
torch.manual_seed(1000 * SEED + rank)  # masks of dropout differ between ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = loader(text())

for step, (inputs, labels) in enumerate(batches):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
