"""FSDP2 of a language model whose tied weights came apart: ``to_empty`` gave each module a parameter of its own.

    torchrun --nproc-per-node 4 examples/incidents/g08_untied.py [healthy]

It is built on the meta device; ``to_empty`` replaces parameters module by module, so the tie must be made again.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

MISTAKE = "healthy" not in sys.argv
STEPS, BATCH, LENGTH, DIM, VOCABULARY = 3, 4, 16, 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, DIM), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
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
data = torch.Generator().manual_seed(100 + rank)

for step in range(STEPS):
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=data)
    tokens = ((first + torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

dist.destroy_process_group()
