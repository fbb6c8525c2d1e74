"""Loops that resume in the same process after the watched steps, or go on otherwise: batches, generators, states.

Each healthy loop stands beside its broken twin.
"""

import contextlib
import io
import random

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import doctor
from shardproof.testing import world
from tests.harness.test_doctor_loops import adamw, perceptron, sgd, titles

#: Looks are at step 4, at step 8 and at the end; a training resumes after step 5.
STEPS, AT = 10, 6

ONE_STATE = "random generators of ranks are in one state in a later step [D28, S9]"
SAME = "ranks read the same data in a later step [D9, S11]"
APART = "replicas differ in a later step [D1, S9]"
SOME = "copies of the model are written on some ranks only [D31, S9]"
DRIFT = "copies of the model drift apart [D31, S9]"
EVALUATES = "modules are in evaluation mode in a later step [D28]"


class Loader:
    """Reads the rows of a rank, from a place that can be saved."""

    def __init__(self, rank):
        self.rank, self.place = rank, 0

    def batch(self):
        self.place += 1
        own = torch.Generator().manual_seed(1000 * self.place + self.rank)
        return torch.randn(8, 6, generator=own), torch.randint(3, (8,), generator=own)


def build(wrap, make=adamw, net=perceptron):
    model = wrap(net())
    return model, make(model)


def steps(model, optimizer, loader, count, *, draw=None, accumulates=1):
    for _ in range(count):
        optimizer.zero_grad()
        for number in range(accumulates):
            inputs, labels = loader.batch()
            noise = draw(inputs) if draw is not None else 0.0
            last = number == accumulates - 1 or not hasattr(model, "no_sync")
            with contextlib.nullcontext() if last else model.no_sync():
                F.cross_entropy(model(inputs + noise), labels).backward()
        optimizer.step()


def resumed(
    data, *, loader=None, restore=None, load=None, draw=None, wrap=fully_shard, rebuilds=True, net=perceptron, **options
):
    """A training that is built anew after some steps, and goes on from what was saved.

    Args:
        loader: returns the rank whose rows are read after it.
        restore: sets generators.
        load: changes the state on some ranks.
    """
    model, optimizer = build(wrap, net=net)
    mine = Loader(data.rank)
    torch.manual_seed(10 + data.rank)
    random.seed(10 + data.rank)
    numpy.random.seed(10 + data.rank)
    steps(model, optimizer, mine, AT, draw=draw, **options)
    if rebuilds:
        state = {name: one.clone() for name, one in model.state_dict().items()}
        of_optimizer = optimizer.state_dict()
        model, optimizer = build(wrap, net=net)
        model.load_state_dict(state)
        optimizer.load_state_dict(of_optimizer)
    if load is not None:
        load(data, model, optimizer)
    if loader is not None:
        mine.rank = loader(data.rank)
    if restore is not None:
        restore(data.rank)
    steps(model, optimizer, mine, STEPS - AT, draw=draw, **options)


def noise(inputs):
    return 0.1 * torch.randn_like(inputs)


def noise_of_python(inputs):
    return 0.1 * random.random()


def noise_of_numpy(inputs):
    return torch.from_numpy(numpy.random.randn(*inputs.shape)).float()


def own_noise(inputs):
    """By a generator that belongs to the rows."""
    return 0.1 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(int(inputs.sum() * 100) % 1000))


def seed_all(rank):
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


def seed_each(rank):
    torch.manual_seed(5 + rank)
    random.seed(5 + rank)
    numpy.random.seed(5 + rank)


def shared_now_and_then(data, *, each=2):
    """A second microbatch is one of all ranks in each second step."""
    model, optimizer = build(DDP)
    own, shared = Loader(data.rank), Loader(7)
    for step in range(STEPS):
        optimizer.zero_grad()
        for loader in (own, shared) if step % each == 0 else (own,):
            inputs, labels = loader.batch()
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def few_values(data):
    """The inputs are a few numbers, which may be equal by chance."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 3)))
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs = torch.full((4,), (step + data.rank) % 3 if step < 3 else step % 3)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs).backward()
        optimizer.step()


def folds(data, *, count=3, make=DDP):
    """A model for each fold, one after the other, each from its own draw; the first part of a later one is frozen."""
    for fold in range(count):
        net = perceptron()
        torch.manual_seed(fold)
        for one in net.parameters():
            nn.init.normal_(one, std=0.1)
        net[0].requires_grad_(fold == 0)
        model = make(net)
        optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1)
        steps(model, optimizer, Loader(data.rank + 10 * fold), 5)


def forget_moments(data, model, optimizer):
    for state in optimizer.state.values() if data.rank == 0 else ():
        state["exp_avg"].zero_()


def load_other(data, model, optimizer):
    """Rank 1 loads another checkpoint than rank 0."""
    if data.rank == 1:
        model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})


def stay_in_eval(data, model, optimizer):
    model.eval()


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))


def replicate(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return model


def rollouts(data, *, stale=None, noisy=None, wrap=fully_shard, calls=True, writers=(0, 1)):
    """Each rank has a full copy of the model for rollouts, which it writes after each step.

    Args:
        stale: from which step on rank 1 writes it no more.
        noisy: from which step on each rank adds noise of its own.
        writers: the ranks that write it at all.
    """
    model = wrap(perceptron())
    engine = perceptron().requires_grad_(False).eval()
    optimizer = adamw(model)
    for step in range(STEPS):
        inputs, labels = data.batch()
        if calls:
            engine(inputs)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        with torch.no_grad():
            values = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
            is_stale = stale is not None and step >= stale and data.rank == 1
            for own, one in (
                zip(engine.parameters(), values, strict=True) if not is_stale and data.rank in writers else ()
            ):
                own.copy_(one)
                if noisy is not None and step >= noisy:
                    own += 0.01 * data.noise(*own.shape)


#: Healthy loops: the notes that are printed.
HEALTHY = {
    "resumed": (resumed, set()),
    "resumed under DDP": (lambda data: resumed(data, wrap=DDP), set()),
    "resumed under HSDP": (lambda data: resumed(data, wrap=replicate), set()),
    "resumed with dropout": (lambda data: resumed(data, wrap=DDP, net=dropping, restore=seed_each), set()),
    "accumulates": (lambda data: resumed(data, wrap=DDP, accumulates=2), set()),
    "noise of each rank": (lambda data: resumed(data, draw=noise, restore=seed_each), set()),
    "seeded alike, drawn by none": (lambda data: resumed(data, draw=own_noise, restore=seed_all), set()),
    "rows of the other rank": (lambda data: resumed(data, loader=lambda rank: 1 - rank), set()),
    "a batch of all now and then": (shared_now_and_then, set()),
    "few values": (few_values, set()),
    "folds": (folds, set()),
    "rollouts": (rollouts, set()),
    "rollouts under DDP": (lambda data: rollouts(data, wrap=DDP), set()),
    "a copy of rank 0 alone": (lambda data: rollouts(data, writers=(0,), calls=False), set()),
    "folds of bare models": (lambda data: folds(data, make=lambda net: net), {"gradients are not reduced [D11, S2]"}),
}

#: Loops with a mistake, and all that is said.
BROKEN = {
    "loader of one rank": (lambda data: resumed(data, loader=lambda rank: 0), SAME),
    "loader of one rank under DDP": (lambda data: resumed(data, loader=lambda rank: 0, wrap=DDP), SAME),
    "loader of one rank, nothing built anew": (lambda data: resumed(data, loader=lambda rank: 0, rebuilds=False), SAME),
    "loader of one rank, accumulates": (
        lambda data: resumed(data, loader=lambda rank: 0, wrap=DDP, accumulates=2), SAME),
    "generator of one rank": (lambda data: resumed(data, draw=noise, restore=seed_all), ONE_STATE),
    "generator of one rank, nothing built anew": (
        lambda data: resumed(data, draw=noise, restore=seed_all, rebuilds=False), ONE_STATE),
    "generator of one rank for dropout": (
        lambda data: resumed(data, net=dropping, restore=seed_all, wrap=DDP), ONE_STATE),
    "generator of Python": (lambda data: resumed(data, draw=noise_of_python, restore=seed_all), ONE_STATE),
    "generator of numpy": (lambda data: resumed(data, draw=noise_of_numpy, restore=seed_all), ONE_STATE),
    "checkpoints of ranks": (lambda data: resumed(data, load=load_other, wrap=replicate), APART),
    "moments of one rank": (lambda data: resumed(data, load=forget_moments, wrap=DDP), APART),
    "a copy that is stale from the begin on": (lambda data: rollouts(data, stale=0), SOME),
    "a stale copy": (lambda data: rollouts(data, stale=1), DRIFT),
    "a copy that is stale later": (lambda data: rollouts(data, stale=4), SOME),
    "a copy that is stale later still": (lambda data: rollouts(data, stale=5), DRIFT),
    "a copy that is stale later under DDP": (lambda data: rollouts(data, stale=4, wrap=DDP), SOME),
    "copies with noise of each rank": (lambda data: rollouts(data, noisy=4), DRIFT),
    "evaluation mode stays": (lambda data: resumed(data, load=stay_in_eval, wrap=DDP, net=dropping), EVALUATES),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_finding(rank: Rank, name):
    loop, noted = HEALTHY[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert not findings and notes == noted


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, said = BROKEN[name]
    findings, notes = titles(loop, rank)
    assert said in findings | notes


@world(2)
def test_a_look_reads_batches_in_its_own_step_alone(rank: Rank):
    """A hook of the root is there in the steps 4 and 8, and in no other step after the watched ones."""
    hooks = []

    class Seen(DDP):
        def forward(self, *args):
            hooks.append(len(self._forward_pre_hooks))
            return super().forward(*args)

    text = io.StringIO()
    with contextlib.redirect_stderr(text), doctor(patience=20):
        model, optimizer = build(Seen)
        steps(model, optimizer, Loader(rank.index), STEPS)
    assert [number for number, count in enumerate(hooks) if count and number > 2] == [4, 8]
    assert not model._forward_pre_hooks
