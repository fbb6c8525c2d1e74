"""Loops under the doctor whose steps begin to have more microbatches, with losses that are divided by it or are not."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import Data, perceptron, sgd, titles

SUM = functools.partial(F.cross_entropy, reduction="sum")

GROWS = "the loss is not divided by a growing number of microbatches [D11, S1]"

#: Looks are at step 4, at step 8 and at the end; the microbatches of each step.
RAMP, LATE, ENDS = (1, 1, 1, 1, 1, 2, 2, 4, 4, 4), (2, 2, 2, 2, 2, 2, 2, 4, 4, 4), (4, 4, 2, 4, 4, 2, 4, 4, 2, 4)
EPISODES = (1, 1, 2, 1, 3, 2, 2, 4, 3, 4)


def units():
    model = perceptron()
    fully_shard(model[0])
    return fully_shard(model)


def synced(model, *, is_last):
    if isinstance(model, DDP):
        model.require_backward_grad_sync = is_last
    else:
        model.set_requires_gradient_sync(is_last)


def ramped(
    data, *, by=lambda count: 1.0, plan=RAMP, wrap=lambda: DDP(perceptron()), loss=F.cross_entropy, clips=False,
    after=None, make=sgd, scaler=None,
):  # fmt: skip
    """Each microbatch's loss is divided by a function of the number of microbatches of the step."""
    model = wrap()
    every = make(model)
    every = every if isinstance(every, list) else [every]
    for count in plan:
        for number in range(count):
            synced(model, is_last=number == count - 1)
            inputs, labels = data.batch()
            value = loss(model(inputs), labels) / by(count)
            (value if scaler is None else scaler.scale(value)).backward()
        if after is not None:
            after(model, count)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for one in every:
            one.step() if scaler is None else scaler.step(one)
        if scaler is not None:
            scaler.update()
        for one in every:
            one.zero_grad()


def two(model):
    """An optimizer for weights, and one for biases."""
    parts = ([one for one in model.parameters() if one.ndim == n] for n in (2, 1))
    return [torch.optim.SGD(part, lr=0.1) for part in parts]


@torch.no_grad()
def divide(model, count):
    """Divide gradients after the last backward of a step."""
    for one in model.parameters():
        one.grad.div_(count)


def bigger(data, *, plan=RAMP):
    """One mean over all rows of the step."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for count in plan:
        inputs, labels = (torch.cat(some) for some in zip(*(data.batch() for _ in range(count)), strict=True))
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def adversarial(data, *, begins=5):
    """From a step on the loss of inputs that another backward pass has found, whose gradients are zeroed."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for step in range(10):
        inputs, labels = data.batch()
        if step >= begins:
            inputs.requires_grad_()
            F.cross_entropy(model(inputs), labels).backward()
            inputs = (inputs + 0.01 * inputs.grad.sign()).detach()
            optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_penalty(data, *, begins=5):
    """From a step on another loss, with a backward pass of its own."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for step in range(10):
        inputs, labels = data.batch()
        F.cross_entropy(model(inputs), labels).backward()
        if step >= begins:
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


#: Healthy loops.
HEALTHY = {
    "ramp": lambda data: ramped(data, by=float),
    "ramp under fully_shard": lambda data: ramped(data, by=float, wrap=units),
    "gradients divided by hand": lambda data: ramped(data, after=divide),
    "gradients divided by hand and clipped": lambda data: ramped(data, after=divide, clips=True),
    "sums over all rows": lambda data: ramped(data, by=lambda count: 8.0 * count, loss=SUM),
    "bigger batches": bigger,
    "shorter windows of epochs": lambda data: ramped(data, by=lambda count: 4.0, plan=ENDS),
    "always a sum": lambda data: ramped(data, plan=(3,) * 10),
    "episodes": lambda data: ramped(data, plan=EPISODES),
    "adversarial inputs": adversarial,
    "a penalty": with_penalty,
    "scaled": lambda data: ramped(
        data, by=float, scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)),
}  # fmt: skip

#: Loops with a mistake, each of which gets the note.
BROKEN = {
    "ramp": ramped,
    "ramp under fully_shard": lambda data: ramped(data, wrap=units),
    "ramp by the first number": lambda data: ramped(data, by=lambda count: 2.0, plan=LATE),
    "ramp with clipping": lambda data: ramped(data, clips=True),
    "ramp of two optimizers": lambda data: ramped(data, make=two),
    "ramp of squares": lambda data: ramped(data, loss=lambda out, y: (out - F.one_hot(y, 3)).square().mean()),
    "ramp in the watched steps": lambda data: ramped(data, plan=(1, 1, 2, 2, 4, 4, 4, 4, 4, 4)),
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
    assert titles(BROKEN[name], rank, registered=Ties()) == (set(), {GROWS})


@pytest.mark.sampled
@world(2)
def test_losses_have_the_same_bits(rank: Rank):
    def loop(losses):
        torch.manual_seed(1)
        model = DDP(perceptron())
        optimizer, data = sgd(model), Data(rank.index)
        for count in RAMP:
            for _ in range(count):
                inputs, labels = data.batch()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    alone, watched = [], []
    loop(alone)
    titles(lambda _: loop(watched), rank, registered=Ties())
    assert alone == watched
