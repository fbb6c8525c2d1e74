"""FSDP2 with ``set_gradient_divide_factor(1)``: each rank's loss is divided by the tokens of all ranks."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

setup()
tokens, labels = text().tensors
labels = labels.masked_fill(torch.arange(16) >= torch.randint(4, 16, (64, 1)), -100)
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
for module in (*model.blocks, model):
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, target) in enumerate(loader(TensorDataset(tokens, labels))):
    count = (target != -100).sum()
    dist.all_reduce(count)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), target.flatten(), reduction="sum") / count
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    log(step, loss=loss)
finish(model)
