"""FSDP2 whose parameters have an optimizer each, which steps in a hook after the gradient has been accumulated."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

setup()
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_now)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    log(step, loss=loss)
finish(model)
