"""FSDP2 of a language model whose tied weights came apart: ``to_empty`` gave each module a parameter of its own.

    torchrun --nproc-per-node 4 examples/incidents/g08_untied.py [healthy]

It is built on the meta device; ``to_empty`` replaces parameters module by module, so the tie must be made again.
"""

import torch
import torch.distributed as dist
from common import DIM, MISTAKE, STEPS, VOCABULARY, Block, counting, start, update
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

BATCH = 4


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, DIM), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


device = start()

with torch.device("meta"):
    model = LanguageModel()
model.to_empty(device=device)
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
if not MISTAKE:
    model.embed.weight = model.head.weight
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + dist.get_rank())

for step in range(STEPS):
    tokens = counting(BATCH, data).to(device)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    update(model, optimizer, step, loss.item())

dist.destroy_process_group()
