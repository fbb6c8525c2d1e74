"""Context parallelism by hand: each rank has a part of the sequence and gathers keys and values with a backward."""

import torch
import torch.distributed as dist
from common import LENGTH, VOCABULARY, finish, log, setup, text
from torch import nn
from torch.nn import functional as F


class GatherSequence(torch.autograd.Function):
    """The parts of all ranks along the sequence; its backward sums the gradients that all ranks have of this part."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 2)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, v = (GatherSequence.apply(part.contiguous()) for part in (k, v))
        start, length = dist.get_rank() * q.shape[2], q.shape[2]
        mask = torch.arange(k.shape[2]) <= torch.arange(start, start + length)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.proj(y.transpose(1, 2).flatten(2))


rank, world = setup()
model = nn.Sequential(nn.Embedding(VOCABULARY, 16), Attention(16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens, labels = text(32).tensors

for step in range(4):
    rows = slice(8 * step, 8 * step + 8)
    part = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    logits = model(tokens[rows, part])
    loss = F.cross_entropy(logits.flatten(0, 1), labels[rows, part].flatten())
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():  # the mean over the parts of the sequence
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    log(step, loss=loss)
finish(model)
