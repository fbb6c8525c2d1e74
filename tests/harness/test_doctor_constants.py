"""Loops whose modules have tensors that never change, which ranks may have alike, otherwise, or not at all."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.harness.test_doctor_loops import FLAT, STEPS, adamw, reduces_by_hand, titles

EMPTY = "a rank has not filled its constants [D20, S9]"
APART = "note: constants differ between ranks [D20, S9]"
SENDS_NONE = functools.partial(DDP, broadcast_buffers=False, init_sync=False)


class Table(nn.Module):
    """Multiplies by a table, which is a buffer or a plain tensor; it may change, and there are other tensors."""

    def __init__(self, kind="buffer", *, values=None, size=24):
        super().__init__()
        self.size = size
        made = torch.linspace(-1, 1, size) if values is None else values(size)
        if kind == "attribute":
            self.table = made
        else:
            self.register_buffer("table", made, persistent=kind == "saved")
        self.last = nn.Linear(size, 3)

    def forward(self, inputs):
        return self.last(inputs[:, :1] * (self.table + 1.5))


class Unread(Table):
    """The forward does not name the table, as of a count for an evaluation."""

    def forward(self, inputs):
        return self.last(inputs[:, :1].expand(-1, self.size))


class Lookup(Table):
    """The table is written in forward: a queue, or a cache that the first forward fills."""

    def forward(self, inputs):
        with torch.no_grad():
            self.table = self.table.roll(1) if self.fills is None else self.fills(self.size)
        return super().forward(inputs)


class Filled(Lookup):
    @staticmethod
    def fills(size):
        return torch.linspace(-1, 1, size)


class Queue(Lookup):
    fills = None


def trains(data, wrap, make=Table, *, apart=None):
    """Train a model with a table; some ranks may change theirs once it is wrapped."""
    torch.manual_seed(0)
    table = make()
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), table)
    wrapped = model if wrap is None else wrap(model)
    if apart is not None:
        apart(table, data.rank)
    optimizer = adamw(wrapped)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        F.cross_entropy(wrapped(inputs), labels).backward()
        if wrap is None:
            reduces_by_hand(model)
        optimizer.step()


def zeros_on_1(table, rank):
    table.table.mul_(rank != 1)


def draws(table, rank):
    table.table.copy_(torch.randn(table.size, generator=torch.Generator().manual_seed(rank)))


def masks(table, rank):
    """A mask, of which rank 0 hides nothing."""
    table.table.copy_(torch.tensor([0.0, -1.0]).repeat(table.size // 2) * rank)


def counts(table, rank):
    table.table.fill_(rank)


def from_meta(data, *, resets):
    """Rank 0 has the model, and others get its state; tables that no state has, they have to make."""
    torch.manual_seed(0)
    with torch.device("meta" if data.rank else "cpu"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Table())
    full = {} if data.rank else {name: one.clone() for name, one in model.state_dict().items()}
    fully_shard(model)
    if data.rank:
        model.to_empty(device="cpu")
        model[2].table.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    if resets:
        model[2].table.copy_(torch.linspace(-1, 1, 24))
    optimizer = adamw(model)
    for _ in range(STEPS):
        inputs, labels = data.batch()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def of(kind, make=Table, **options):
    return functools.partial(make, kind, **options)


#: Healthy loops, none of which is noted.
HEALTHY = {
    "alike": lambda data: trains(data, fully_shard),
    "an attribute": lambda data: trains(data, fully_shard, of("attribute")),
    "under FSDP1": lambda data: trains(data, FLAT),
    "from the meta device": lambda data: from_meta(data, resets=True),
    "sent by DDP": lambda data: trains(data, DDP, apart=zeros_on_1),
    "zeros on all": lambda data: trains(data, SENDS_NONE, of("buffer", values=torch.zeros)),
    "not read": lambda data: trains(data, fully_shard, of("buffer", Unread), apart=zeros_on_1),
    "few elements": lambda data: trains(data, fully_shard, of("buffer", size=12), apart=zeros_on_1),
    "a count of integers": lambda data: trains(data, fully_shard, of("buffer", values=torch.arange), apart=counts),
    "a queue of each rank": lambda data: trains(data, fully_shard, of("buffer", Queue), apart=draws),
    "a cache": lambda data: trains(data, fully_shard, of("attribute", Filled), apart=zeros_on_1),
}

#: Loops whose ranks differ, and the finding or the note.
BROKEN = {
    "from the meta device": (lambda data: from_meta(data, resets=False), EMPTY),
    "zeros": (lambda data: trains(data, fully_shard, apart=zeros_on_1), EMPTY),
    "zeros in a saved buffer": (lambda data: trains(data, fully_shard, of("saved"), apart=zeros_on_1), EMPTY),
    "zeros in an attribute": (lambda data: trains(data, DDP, of("attribute"), apart=zeros_on_1), EMPTY),
    "zeros under DDP": (lambda data: trains(data, SENDS_NONE, apart=zeros_on_1), EMPTY),
    "zeros under FSDP1": (lambda data: trains(data, FLAT, apart=zeros_on_1), EMPTY),
    "zeros by hand": (lambda data: trains(data, None, apart=zeros_on_1), EMPTY),
    "drawn": (lambda data: trains(data, fully_shard, apart=draws), APART),
    "drawn in an attribute": (lambda data: trains(data, DDP, of("attribute"), apart=draws), APART),
    "a mask": (lambda data: trains(data, fully_shard, apart=masks), APART),
}


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_constants_that_are_alike_are_no_finding(rank: Rank, name):
    assert titles(HEALTHY[name], rank, is_healthy=True) == (set(), set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_constants_that_differ_are_found(rank: Rank, name):
    loop, told = BROKEN[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert findings | {f"note: {one}" for one in notes} == {told}
