"""A training that is resumed, on any number of ranks: six steps with a checkpoint after four, and two from there.

    torchrun --nproc-per-node 1 examples/resuming/train.py
    torchrun --nproc-per-node 2 examples/resuming/train.py resume [MISTAKE]

A mistake is "optimizer" (its states are not loaded), "counter" (its counters of steps begin at 0), "scheduler" (it is
not loaded) or "loader" (it begins with the first batch). docs/record.md shows their recordings compared.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

STEPS, SAVED, BATCH, VOCABULARY, DIM = 6, 4, 8, 32, 16
CHECKPOINT = os.environ.get("CHECKPOINT", "checkpoint.pt")
RESUMES = sys.argv[1:2] == ["resume"]
MISTAKE = "".join(sys.argv[2:3])

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, VOCABULARY))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
full = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save():
    parameters, states = get_state_dict(model, optimizer, options=full)
    if dist.get_rank() == 0:
        torch.save([parameters, states, scheduler.state_dict()], CHECKPOINT)
    dist.barrier()


def load():
    parameters, states, schedule = torch.load(CHECKPOINT)
    if MISTAKE == "counter":
        for one in states["state"].values():
            one["step"].zero_()
    if MISTAKE == "optimizer":
        set_state_dict(model, [], model_state_dict=parameters, optim_state_dict={}, options=full)
    else:
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states, options=full)
    if MISTAKE == "scheduler":
        optimizer.param_groups[0]["lr"] = 1e-2
    else:
        scheduler.load_state_dict(schedule)
        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]


def train(step):
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, 9), generator=made).chunk(dist.get_world_size())[dist.get_rank()]
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


if RESUMES:
    load()
    start = 0 if MISTAKE == "loader" else SAVED
else:
    start = 0
for step in range(start, start + STEPS - SAVED if RESUMES else STEPS):
    train(step)
    if step + 1 == SAVED and not RESUMES:
        save()

dist.destroy_process_group()
