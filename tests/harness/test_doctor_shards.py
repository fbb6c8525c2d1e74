"""Loops under the doctor with copies of the shards of a model, which some ranks do not write, beside healthy ones."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import adamw, titles

SOME = "shards of a copy of the model are written on some ranks only [D31, S9]"
RATES = "shards of a copy of the model follow by different rates [D31, S9]"

#: Looks are at step 4 and at step 8.
STEPS = 10


def units():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 1))  # whose bias is on one rank
    fully_shard(model[0])
    return fully_shard(model)


def replicas():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)), mesh=mesh)


def flat():
    cpu = torch.device("cpu")
    first = FullyShardedDataParallel(nn.Linear(6, 16), device_id=cpu, use_orig_params=True)
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 1))
    return FullyShardedDataParallel(net, device_id=cpu, use_orig_params=True)


class Average:
    """A moving average of what a rank has, in place."""

    def __init__(self, model, decay):
        self.decay, self.shadow = decay, self.copies(model)

    @staticmethod
    def copies(model):
        return {name: one.detach().clone() for name, one in model.named_parameters()}

    def parts(self, model):
        return [(self.shadow[name], one.detach()) for name, one in model.named_parameters()]

    @torch.no_grad()
    def update(self, model):
        for own, one in self.parts(model):
            own.mul_(self.decay).add_(one, alpha=1 - self.decay)


class OutOfPlace(Average):
    """The same, with a new tensor each time."""

    @torch.no_grad()
    def update(self, model):
        for name, one in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * one.detach()


class Anew(Average):
    """The same, with a new dict each time."""

    @torch.no_grad()
    def update(self, model):
        kept = self.shadow
        self.shadow = {n: kept[n].lerp(one.detach(), 1 - self.decay) for n, one in model.named_parameters()}


class OfStates(Average):
    """A copy of the state dict."""

    @staticmethod
    def copies(model):
        return {name: one.detach().clone() for name, one in model.state_dict().items()}


class OfShards(Average):
    """A list of local tensors."""

    @staticmethod
    def copies(model):
        return [one.detach().to_local().clone() for one in model.parameters()]

    def parts(self, model):
        return [*zip(self.shadow, (one.detach().to_local() for one in model.parameters()), strict=True)]


class Before(Average):
    """The shards of before the step, as to tell how far it goes."""

    @torch.no_grad()
    def update(self, model):
        self.shadow = self.copies(model)


class Full(Average):
    """Full tensors, of which rank 0 keeps a moving average."""

    def __init__(self, model, decay):
        self.decay, self.shadow = decay, {}

    @torch.no_grad()
    def gather(self, model):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    @torch.no_grad()
    def update(self, state):
        for name, one in state.items():
            self.shadow[name] = self.shadow.get(name, one.clone()).lerp(one, 1 - self.decay)


def averaged(
    data, *, make=units, keep=Average, only=None, since=0, every=1, held=(0, 1), decay=lambda rank: 0.9, when="after"
):  # fmt: skip
    """A loop in which ranks, all of them or one, write a copy of their shards from a step on."""
    torch.manual_seed(3)
    model = make()
    optimizer = adamw(model)
    mean = keep(model, decay(data.rank)) if data.rank in held else None
    for step in range(STEPS):
        inputs, _ = data.batch()
        F.mse_loss(model(inputs), torch.ones(8, 1)).backward()
        is_mine = mean is not None and (only in (None, data.rank) or step < since) and step % every == 0
        if when == "before" and is_mine:
            mean.update(model)
        optimizer.step()
        optimizer.zero_grad()
        given = mean.gather(model) if keep is Full else model
        if when == "after" and is_mine:
            mean.update(given)


#: Healthy loops.
HEALTHY = {
    "all ranks": averaged,
    "all ranks, out of place": lambda data: averaged(data, keep=OutOfPlace),
    "all ranks, of flat parameters": lambda data: averaged(data, make=flat),
    "each second step": lambda data: averaged(data, every=2),
    "one replica of a mesh": lambda data: averaged(data, make=replicas, only=0),
    "full tensors on one rank": lambda data: averaged(data, keep=Full, only=0),
    "never": lambda data: averaged(data, only=2),
    "values of before the step on one rank": lambda data: averaged(data, keep=Before, only=0, when="before"),
}

#: Loops with a mistake, and the note.
BROKEN = {
    "dict on one rank": (lambda data: averaged(data, only=0), SOME),
    "new tensors on one rank": (lambda data: averaged(data, keep=OutOfPlace, only=0), SOME),
    "a new dict on one rank": (lambda data: averaged(data, keep=Anew, only=0), SOME),
    "state dict on one rank": (lambda data: averaged(data, keep=OfStates, only=0), SOME),
    "local shards on one rank": (lambda data: averaged(data, keep=OfShards, only=1), SOME),
    "parts of flat ones on one rank": (lambda data: averaged(data, make=flat, only=0), SOME),
    "kept by one rank": (lambda data: averaged(data, held=(0,)), SOME),
    "one rank from a later step on": (lambda data: averaged(data, only=0, since=4), SOME),
    "decay by rank": (lambda data: averaged(data, decay=lambda rank: 0.9 - 0.2 * rank), RATES),
}


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_note(rank: Rank, name):
    assert titles(HEALTHY[name], rank, is_healthy=True, registered=Ties()) == (set(), set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_noted(rank: Rank, name):
    loop, title = BROKEN[name]
    assert titles(loop, rank, registered=Ties()) == (set(), {title})
