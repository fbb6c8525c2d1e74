"""FSDP2 with a full state dict on the first rank after each step, and a resumption from it in the middle."""

import copy

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

setup()
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
full = StateDictOptions(full_state_dict=True, cpu_offload=True)

for step, (inputs, labels) in enumerate(loader(text(96))):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    saved, states = get_state_dict(model, optimizer, options=full)
    numbers = torch.tensor([float(one.double().norm()) for one in saved.values()])
    log(step, loss=loss, saved=numbers.norm())
    if step == 2:
        sharded = get_state_dict(model, optimizer)
        set_state_dict(
            model, optimizer, model_state_dict=copy.deepcopy(sharded[0]), optim_state_dict=copy.deepcopy(sharded[1])
        )
finish(model)
