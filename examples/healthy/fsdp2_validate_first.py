"""FSDP2 with a validation before the first step, whose forward leaves the root's parameters gathered."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

setup()
model = GPT(dropout=0.1)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
training, held_out = loader(text()), loader(text(16))


def evaluate():
    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) for inputs, labels in held_out]
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
    return mean


log(-1, validation=evaluate())
for step, (inputs, labels) in enumerate(training):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
    log(step, validation=evaluate())
finish(model)
