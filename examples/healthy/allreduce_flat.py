"""Data parallelism by one all-reduce of all gradients in a flat buffer, with accumulation and a summed loss."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional as F

rank, world = setup()
model = GPT()
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = list(loader(text(), batch=8))

for step in range(len(batches) // 2):
    for inputs, labels in batches[2 * step : 2 * step + 2]:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        (loss / (2 * world)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(reduced)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
