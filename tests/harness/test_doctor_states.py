"""Loops under the doctor with frozen parameters, buffers, replicas by hand and narrow dtypes, beside broken twins."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import doctor
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, Data, adamw, perceptron, reduces_by_hand, titles, train

UNLIKE = "note: buffers differ between ranks [D20, S9]"


# Frozen parameters


def frozen(data, *, clears=True):
    """The first layer is frozen after a step; its gradient may stay, as zeros."""
    model = perceptron()
    optimizer = adamw(model)
    for step in range(STEPS):
        inputs, labels = data.batch()
        optimizer.zero_grad(set_to_none=clears)
        F.cross_entropy(model(inputs), labels).backward()
        reduces_by_hand(model)
        optimizer.step()
        if step == 0:
            model[0].requires_grad_(False)


def partly_frozen(data, *, holds=True, replaces=None, moves=False):
    """The first layer is frozen, with or without a place in the optimizer; something may replace its parameters."""
    model = perceptron()
    first, *rest = model.children()
    first.requires_grad_(False)
    for name, one in [*first.named_parameters()] if replaces is not None else ():
        setattr(first, name, replaces(one))
    fully_shard(model)
    optimizer = adamw(model if holds else nn.ModuleList(rest))

    def before(step):
        for one in first.parameters() if moves else ():
            one.grad = torch.ones_like(one)

    train(model, optimizer, data, before=before)


# Buffers


class Router(nn.Module):
    """Experts that tokens choose by a score with a bias, which balances their load."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(6, 3, bias=False), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.register_buffer("bias", torch.zeros(3))
        self.load = torch.zeros(3)

    def forward(self, inputs):
        scores = self.gate(inputs).sigmoid()
        weights = torch.where(F.one_hot((scores + self.bias).argmax(-1), 3).bool(), scores, 1e-3)
        self.load = weights.detach().sum(0)
        return sum(weights[:, n : n + 1] * expert(inputs) for n, expert in enumerate(self.experts))

    def balance(self, *, reduces):
        if reduces:
            dist.all_reduce(self.load)
        self.bias -= 0.1 * (self.load / self.load.sum() - 1 / 3)


def routed(data, wrap=fully_shard, *, reduces=True):
    """The bias of a router follows the load of all ranks, or of each rank's own data; without a wrapper as well."""
    torch.manual_seed(0)
    router = Router()
    model = nn.Sequential(nn.Linear(6, 6), router)
    model = model if wrap is None else wrap(model)

    def before(step):
        if wrap is None:
            reduces_by_hand(model)

    train(model, adamw(model), data, before=before, after=lambda step: router.balance(reduces=reduces))


def normalized(data, wrap):
    """BatchNorm, whose running statistics are of each rank's own data."""
    model = wrap(perceptron(nn.BatchNorm1d))
    train(model, adamw(model), data)


# Replicas without a wrapper


def begins_apart(data, *, broadcasts=False):
    """Ranks begin with different weights and average their gradients; a broadcast may follow the first backward."""
    model = perceptron()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.1 * dist.get_rank())

    def before(step):
        reduces_by_hand(model)
        for one in model.parameters() if broadcasts and step == 0 else ():
            dist.broadcast(one.detach(), 0)

    train(model, adamw(model), data, before=before)


# Narrow dtypes


def narrow(data, *, lr, betas=(0.9, 0.95), dtype=torch.bfloat16, wrap=DDP):
    """Parameters and moments in a narrow dtype, by updates that may be below the spacing of most of their values."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    model = wrap(nn.Sequential(*layers).to(dtype))

    def draw(data):
        inputs, labels = data.batch()
        return inputs.to(dtype), labels

    train(model, torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0), data, draw=draw)


#: Healthy loops: the notes that are printed, by check.
HEALTHY = {
    "frozen after a step": (frozen, "parameters stop training [D19]"),
    "frozen in the optimizer": (partly_frozen, "the optimizer holds frozen parameters [D19]"),
    "frozen": (lambda data: partly_frozen(data, holds=False), ""),
    "frozen with gradients by hand": (lambda data: partly_frozen(data, moves=True), "frozen parameters move [D19]"),
    "frozen and replaced": (lambda data: partly_frozen(data, replaces=lambda old: nn.Parameter(old.detach().clone())),
                            "frozen parameters train [D19]"),
    "frozen and replaced by frozen ones": (
        lambda data: partly_frozen(data, holds=False, replaces=lambda old: nn.Parameter(old.detach(), False)), ""),
    "router": (routed, ""),
    "router under DDP": (lambda data: routed(data, DDP), ""),
    "router by hand": (lambda data: routed(data, None), ""),
    "BatchNorm under FSDP2": (lambda data: normalized(data, fully_shard), ""),
    "BatchNorm under DDP": (lambda data: normalized(data, DDP), ""),
    "BatchNorm of each rank": (lambda data: normalized(data, functools.partial(DDP, broadcast_buffers=False)), ""),
    "begins apart and broadcasts": (lambda data: begins_apart(data, broadcasts=True), ""),
    "bfloat16": (lambda data: narrow(data, lr=1e-2), ""),
    "bfloat16 under FSDP2": (lambda data: narrow(data, lr=1e-2, wrap=fully_shard), ""),
    "small rate in float32": (lambda data: narrow(data, lr=2e-4, betas=(0.9, 0.999), dtype=torch.float32), ""),
}  # fmt: skip

#: Loops with a mistake, and the finding, or the note where the mistake may be meant.
BROKEN = {
    "frozen and stepped": (lambda data: frozen(data, clears=False), "frozen parameters move [D19]"),
    "router by rank": (lambda data: routed(data, reduces=False), UNLIKE),
    "router under DDP by rank": (lambda data: routed(data, DDP, reduces=False), UNLIKE),
    "router by hand by rank": (lambda data: routed(data, None, reduces=False), UNLIKE),
    "begins apart": (begins_apart, "ranks began with different parameters, and average their gradients [D1, S9]"),
    "small rate in bfloat16": (lambda data: narrow(data, lr=2e-4), "note: updates are lost to rounding [D6, S13]"),
    "small rate in bfloat16 under FSDP2": (lambda data: narrow(data, lr=2e-4, wrap=fully_shard),
                                           "note: updates are lost to rounding [D6, S13]"),
    "slow moments in bfloat16": (lambda data: narrow(data, lr=1e-2, betas=(0.9, 0.999)),
                                 "note: moments are lost to rounding [D6, S13]"),
}  # fmt: skip


# Two models


def adversaries(data, watch, *, zeroes=True):
    """A generator and then a critic under FSDP2, each with an optimizer; the critic's gradients may stay."""
    torch.manual_seed(0)
    generator = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)))
    critic = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator, of_critic = adamw(generator), adamw(critic)
    with contextlib.ExitStack() as stack:
        watching = [stack.enter_context(one) for one in watch((generator, of_generator), (critic, of_critic))]
        for real, _ in data.batches():
            fake = generator(data.noise(8, 4))
            if zeroes:
                of_critic.zero_grad()
            (F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            of_generator.step()
    return watching


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("zeroes", [True, False])
def test_each_of_two_models_has_a_doctor_of_its_own(rank: Rank, zeroes):
    """One for both watches the first, and says that it does not see the other."""
    make = functools.partial(doctor, on_finding="collect", patience=20)
    both = adversaries(Data(rank.index), lambda *models: [make(*one) for one in models], zeroes=zeroes)
    found = [[one.render().splitlines()[0] for one in watching.findings] for watching in both]
    assert found == [[], [] if zeroes else ["step 1: gradients are never zeroed [D11, S4]"]]
    assert not any("another AdamW" in watching.summary() for watching in both)
    assert [watching.summary().partition(" parameters (")[2].partition(")")[0] for watching in both] == [
        "72 elements", "65 elements"
    ]  # fmt: skip
    (first,) = adversaries(Data(rank.index), lambda *models: [make()], zeroes=zeroes)
    assert "72 elements" in first.summary() and not first.findings
    assert "the model that another AdamW steps, which has no parameter of the watched" in first.summary()


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_finding(rank: Rank, name):
    loop, note = HEALTHY[name]
    findings, notes = titles(loop, rank, is_healthy=True, registered=Ties())
    assert not findings and notes == ({note} if note else set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, finding = BROKEN[name]
    findings, notes = titles(loop, rank, is_healthy=finding.startswith("note: "), registered=Ties())
    assert finding in findings | {f"note: {one}" for one in notes}
