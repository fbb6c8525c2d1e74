"""A training with a scheduler, a loader, dropout and an average of its weights, which is saved and resumed.

    shardproof check --save-and-resume 3 --mesh dp=2 --model checkpoint.py:model \\
        --parallelize checkpoint.py:parallelize --optimizer checkpoint.py:optimizer \\
        --objects checkpoint.py:objects --data checkpoint.py:data --step checkpoint.py:step \\
        --save checkpoint.py:save --load checkpoint.py:load

MISTAKE=NAME in the environment makes a mistake: "moments" (those of the second group are not saved), "scheduler" (it is
not loaded), "loader" (it begins with the first batch) or "average" (it is not loaded). docs/check.md shows the output.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

VOCABULARY, DIM, BATCH = 32, 16, 4
MISTAKE = os.environ.get("MISTAKE", "")


def model():
    return nn.Sequential(
        nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Dropout(0.1), nn.Linear(DIM, VOCABULARY)
    )  # fmt: skip


def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh)


def optimizer(model):
    groups = ([one for one in model.parameters() if is_matrix == (one.ndim > 1)] for is_matrix in (True, False))
    matrices, biases = groups
    return torch.optim.AdamW([{"params": matrices}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)


class Loader:
    """Batches of random tokens, each made of the number of those before it."""

    def __init__(self, rank):
        self.rank, self.read = rank, 0

    def __iter__(self):
        return self

    def __next__(self):
        made = torch.Generator().manual_seed(1000 * self.rank + self.read)
        self.read += 1
        tokens = torch.randint(VOCABULARY, (BATCH, 9), generator=made)
        return tokens[:, :-1], tokens[:, 1:]


class Average:
    """A moving average of the parameters."""

    def __init__(self, model):
        self.values = [one.detach().clone() for one in model.parameters()]

    def update(self, model):
        for value, parameter in zip(self.values, model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)


def objects(model, optimizer):
    return {
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10),
        "loader": Loader(dist.get_rank()),
        "average": Average(model),
    }


def data(step, rank, loader):
    return [next(loader)]


def step(model, optimizer, microbatches, mesh, scheduler, average):
    for tokens, labels in microbatches:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / len(microbatches)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.update(model)


def states_of(model, optimizer):
    parameters, states = get_state_dict(model, optimizer)
    if MISTAKE == "moments":
        for group in states["param_groups"][1:]:
            for name in group["params"]:
                del states["state"][name]
    return parameters, states


def save(model, optimizer, scheduler, loader, average, folder, step):
    parameters, states = states_of(model, optimizer)
    averages = {str(number): value for number, value in enumerate(average.values)}
    dcp.save({"model": parameters, "optimizer": states, "average": averages}, checkpoint_id=folder)
    own = {"step": step, "scheduler": scheduler.state_dict(), "read": loader.read, "random": torch.get_rng_state()}
    torch.save(own, f"{folder}/rank{dist.get_rank()}.pt")


def load(model, optimizer, scheduler, loader, average, folder):
    parameters, states = states_of(model, optimizer)
    averages = {str(number): value for number, value in enumerate(average.values)}
    wanted = {"model": parameters, "optimizer": states}
    dcp.load(wanted if MISTAKE == "average" else wanted | {"average": averages}, checkpoint_id=folder)
    options = StateDictOptions(strict=MISTAKE != "moments")
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states, options=options)
    own = torch.load(f"{folder}/rank{dist.get_rank()}.pt")
    if MISTAKE == "scheduler":
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
    else:
        scheduler.load_state_dict(own["scheduler"])
    if MISTAKE != "loader":
        loader.read = own["read"]
    torch.set_rng_state(own["random"])
    return own["step"]
