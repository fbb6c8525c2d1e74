"""Gradient accumulation over microbatches of different lengths, in which each token of all ranks counts alike."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

rank, world = setup()
tokens, labels = text().tensors
lengths = torch.randint(4, 16, (64, 1))
labels = labels.masked_fill(torch.arange(16) >= lengths, -100)
batches = list(loader(TensorDataset(tokens, labels), batch=8))
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(4):
    microbatches = batches[2 * step : 2 * step + 2]
    count = torch.stack([(labels != -100).sum() for _, labels in microbatches]).sum()
    dist.all_reduce(count)
    total = 0.0
    for inputs, labels in microbatches:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = loss * world / count
        loss.backward()
        total += loss.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=total, grad_norm=grad_norm)
finish(model)
