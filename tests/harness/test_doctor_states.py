"""Loops under the doctor whose parameters are frozen, each healthy one beside its broken twin."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, adamw, perceptron, reduces_by_hand, titles, train

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
}  # fmt: skip

#: Loops with a mistake, and the finding, or the note where the mistake may be meant.
BROKEN = {
    "frozen and stepped": (lambda data: frozen(data, clears=False), "frozen parameters move [D19]"),
}  # fmt: skip


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
    findings, _ = titles(loop, rank, registered=Ties())
    assert finding in findings
