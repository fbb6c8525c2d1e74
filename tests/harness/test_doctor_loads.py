"""Loops under the doctor that load states which have no place in the model, or which the next step undoes.

Each healthy one stands beside its broken twin.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.names import without_wrappers
from shardproof.testing import world
from tests.harness.test_doctor_loops import adamw, perceptron, sgd, titles, train

NOTHING = "a load loads nothing [D26]"
PARTLY = "a load leaves keys of another form [D26]"
UNDONE = "a step undoes a load [D26]"


class Tuned(nn.Module):
    """A backbone and a new head."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.backbone(inputs))


class Adapted(Tuned):
    """The same with an adapter, whose weights alone are saved."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, inputs):
        return super().forward(inputs) + self.up(self.down(inputs))


def state(change=lambda name: name, *, seed=7, without=("head",), make=Tuned):
    torch.manual_seed(seed)
    found = make().state_dict()
    return {change(name): torch.randn(one.shape) for name, one in found.items() if not name.startswith(tuple(without))}


def loaded(data, make, *, model=Tuned, wrap=DDP, into=lambda one: one, before_wrap=True, steps=(), **options):
    """Load before the training, and perhaps once more after some steps."""
    made = model()
    if before_wrap:
        into(made).load_state_dict(make(), strict=False, **options)
    wrapped = wrap(made)
    if not before_wrap:
        into(wrapped).load_state_dict(make(), strict=False, **options)

    def after(step):
        if step in steps:
            into(wrapped).load_state_dict(make(), strict=False, **options)

    train(wrapped, adamw(wrapped), data, after=after)


def loaded_again(data):
    """The first form is not that of the module, and user code sees it and removes the prefix."""
    given = state(lambda name: f"module.{name}")

    def fixed(model):
        if len(model.load_state_dict(given, strict=False).unexpected_keys) == len(given):
            model.load_state_dict({key.removeprefix("module."): one for key, one in given.items()}, strict=False)
        return model

    model = DDP(fixed(Tuned()))
    train(model, adamw(model), data)


def loaded_beside(data):
    """A module that no optimizer steps is given what has no place in it."""
    nn.Linear(3, 3).load_state_dict({"other.weight": torch.ones(3, 3)}, strict=False)
    loaded(data, state)


# Loads and steps


class Masters:
    """Trains weights in bfloat16 by copies in float32."""

    def __init__(self):
        self.model = DDP(perceptron().bfloat16())
        self.make()

    def make(self):
        self.copies = [one.detach().float().clone().requires_grad_() for one in self.model.parameters()]
        self.optimizer = sgd(nn.ParameterList(self.copies))

    def step(self, inputs, labels):
        F.cross_entropy(self.model(inputs.bfloat16()).float(), labels).backward()
        for copied, one in zip(self.copies, self.model.parameters(), strict=True):
            copied.grad, one.grad = one.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for copied, one in zip(self.copies, self.model.parameters(), strict=True):
                one.copy_(copied)


def by_masters(data, *, refreshes, at=None, near=False):
    """Load before the first step or after another one, and perhaps read the masters anew."""
    trainer = Masters()
    torch.manual_seed(9)
    given = {
        name: one + (0.01 if near else 1) * torch.randn_like(one) for name, one in trainer.model.state_dict().items()
    }

    def load():
        trainer.model.load_state_dict(given)
        with torch.no_grad():
            for copied, one in zip(trainer.copies, trainer.model.parameters(), strict=True):
                if refreshes:
                    copied.copy_(one)

    if at is None:
        load()
    for number, (inputs, labels) in enumerate(data.batches()):
        trainer.step(inputs, labels)
        if number == at:
            load()


def averaged(data, *, by_load):
    """After each step the model is evaluated with an average of its weights, and gets its own back."""
    model = DDP(perceptron())
    torch.manual_seed(4)
    average = {name: torch.randn_like(one) for name, one in model.state_dict().items()}

    def after(step):
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        with torch.no_grad():
            model(torch.ones(2, 6))
            if by_load:
                model.load_state_dict(own)
            else:
                for name, one in model.named_parameters():
                    one.data = own[name]

    train(model, adamw(model), data, after=after)


def restored_twice(data):
    """A state is restored after a step, and once more after the next."""
    model = DDP(perceptron())
    best = copy.deepcopy(model.state_dict())
    train(model, sgd(model), data, after=lambda step: model.load_state_dict(best))


class Copying(torch.optim.SGD):
    """Steps copies of the parameters, which were made with it, and writes them into these."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.copies = [one.detach().clone() for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for copied, one in zip(self.copies, self.param_groups[0]["params"], strict=True):
            one.copy_(copied.sub_(one.grad, alpha=self.param_groups[0]["lr"]))


def by_copies(data, *, makes_before):
    model = DDP(perceptron())
    torch.manual_seed(9)
    given = {name: torch.randn_like(one) for name, one in model.state_dict().items()}
    optimizer = Copying(model.parameters(), 0.1) if makes_before else None
    model.load_state_dict(given)
    train(model, optimizer or Copying(model.parameters(), 0.1), data)


def prefixed(name):
    return lambda one: f"{name}.{one}"


#: Healthy loops, and the note that they get.
HEALTHY = {
    "a new head": (lambda data: loaded(data, state), ""),
    "another head in the state": (lambda data: loaded(data, lambda: state() | {"old.weight": torch.ones(9)}), ""),
    "an adapter alone": (
        lambda data: loaded(data, lambda: state(make=Adapted, without=("backbone", "head")), model=Adapted), ""),
    "an empty state": (lambda data: loaded(data, dict), ""),
    "loaded again without the prefix": (loaded_again, ""),
    "into what does not train": (loaded_beside, ""),
    "into the part": (
        lambda data: loaded(
            data, lambda: state(lambda name: name.removeprefix("backbone.")), into=lambda one: one.backbone), ""),
    "under FSDP2": (lambda data: loaded(data, state, wrap=fully_shard), ""),
    "another model": (lambda data: loaded(data, lambda: {"a.b": torch.ones(2), "c.d": torch.ones(3)}), NOTHING),
    "half of it with a prefix": (
        lambda data: loaded(
            data, lambda: state(lambda name: f"module.{name}" if "backbone.2" in name else name)), PARTLY),
    "masters read anew": (lambda data: by_masters(data, refreshes=True), ""),
    "masters read anew later": (lambda data: by_masters(data, refreshes=True, at=1), ""),
    "almost the same values": (lambda data: by_masters(data, refreshes=False, near=True), ""),
    "evaluated with an average": (lambda data: averaged(data, by_load=True), ""),
    "evaluated with an average that is copied back": (lambda data: averaged(data, by_load=False), ""),
    "restored twice": (restored_twice, ""),
    "copies of an optimizer, of loaded values": (lambda data: by_copies(data, makes_before=False), ""),
}  # fmt: skip

#: Loops with a mistake, and the finding.
BROKEN = {
    "keys of a compiled model": (lambda data: loaded(data, lambda: state(prefixed("_orig_mod"))), NOTHING),
    "keys of a compiled part": (
        lambda data: loaded(data, lambda: state(lambda name: name.replace(".", "._orig_mod.", 1))), NOTHING),
    "keys of DDP": (lambda data: loaded(data, lambda: state(prefixed("module"))), NOTHING),
    "keys of a trainer": (lambda data: loaded(data, lambda: state(prefixed("model.net"))), NOTHING),
    "into DDP": (lambda data: loaded(data, state, before_wrap=False), NOTHING),
    "the model's keys into its part": (lambda data: loaded(data, state, into=lambda one: one.backbone), NOTHING),
    "a state within a checkpoint": (lambda data: loaded(data, lambda: {"model": state(), "epoch": 3}), NOTHING),
    "assigned": (lambda data: loaded(data, lambda: state(prefixed("module")), assign=True), NOTHING),
    "under FSDP2": (
        lambda data: loaded(data, lambda: state(prefixed("module")), wrap=fully_shard), NOTHING),
    "masters of before": (lambda data: by_masters(data, refreshes=False), UNDONE),
    "masters of before, later": (lambda data: by_masters(data, refreshes=False, at=1), UNDONE),
    "copies of an optimizer, of before": (lambda data: by_copies(data, makes_before=True), UNDONE),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_load_has_no_finding(rank: Rank, name):
    loop, note = HEALTHY[name]
    findings, notes = titles(loop, rank)
    assert UNDONE not in findings and NOTHING not in findings
    assert {one for one in notes if "[D26]" in one} == ({note} if note else set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, finding = BROKEN[name]
    findings, _ = titles(loop, rank)
    # Where nothing but copies in user code steps, rank 0 tells what it has seen itself.
    assert finding in findings


def test_wrappers_add_whole_parts_of_names():
    assert without_wrappers("module._orig_mod.my_module.0._checkpoint_wrapped_module.weight") == "my_module.0.weight"
