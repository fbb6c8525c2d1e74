"""Loops under the doctor whose data are divided among ranks, and divided once more by a sampler.

Each healthy one stands next to its broken twin.
"""

import dataclasses

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.division import check_division
from shardproof.harness.watching.division import Division, division_of
from shardproof.harness.watching.ledger import Read
from shardproof.testing import world
from tests.harness.test_doctor_loops import perceptron, sgd, titles

AGAIN = "the part of each rank is divided again [D29]"
UNREAD = "a sampler has parts that no rank reads [D29]"

ROWS, BATCH = 96, 8


def values(seed=3, rows=ROWS):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def table():
    return TensorDataset(values(), torch.arange(ROWS) % 3)


def loaded(data, make, *, evaluates=False, **options):
    """Train on the data of a rank by a sampler, or evaluate on them after a training on all data."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    rows = make(data.rank)
    sampler = DistributedSampler(rows, **options)
    train = DistributedSampler(whole := table()) if evaluates else sampler
    for epoch in range(2):
        train.set_epoch(epoch)
        for inputs, labels in DataLoader(whole if evaluates else rows, BATCH, sampler=train):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels.long()).backward()
            optimizer.step()
        with torch.no_grad():
            for inputs, _ in DataLoader(rows, BATCH, sampler=sampler) if evaluates else ():
                model(inputs)


def shuffled(data):
    """Each rank shuffles its own part."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    rows = Subset(table(), range(data.rank, ROWS, 2))
    for inputs, labels in DataLoader(rows, BATCH, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def strided(rank):
    return Subset(table(), range(rank, ROWS, 2))


def split(rank):
    """Rows of all ranks without those of an evaluation."""
    return Subset(table(), torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:80].tolist())


class Sharded(Dataset):
    """Files, of which ``shard()`` returns a part as a data set of its own."""

    def __init__(self, files):
        self.files, self.values = files, values()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        number = int(self.files[index].partition(".")[0])
        return self.values[number], number % 3

    def shard(self, number, index):
        return Sharded(self.files[index::number])


class Augmented(Sharded):
    """Files whose rows each rank augments by noise that it draws when it makes the data set."""

    def __init__(self, files, rank):
        super().__init__(files)
        self.noise = [f"{rank} {one}" for one in files]


class Changed(Dataset):
    """A data set around another one."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        inputs, label = self.inner[index]
        return 2 * inputs, label


def files_of(numbers):
    return [f"{one}.png" for one in numbers]


def halves(rank):
    """Rows of the rank, of tensors that it has all of."""
    return TensorDataset(values()[rank::2], torch.arange(ROWS)[rank::2] % 3)


EVERY = list(range(ROWS))

#: Healthy loops.
HEALTHY = {
    "a split of all rows": lambda data: loaded(data, split),
    "all files": lambda data: loaded(data, lambda rank: Sharded(files_of(EVERY))),
    "rows that ranks augment": lambda data: loaded(data, lambda rank: Augmented(files_of(EVERY), rank)),
    "rows of the rank, shuffled": shuffled,
    "rows of the rank by a sampler of one": lambda data: loaded(data, strided, num_replicas=1, rank=0),
    "files in another order": lambda data: loaded(data, lambda rank: Sharded(files_of(EVERY[:: 1 - 2 * rank]))),
    "rows that each rank draws": lambda data: loaded(
        data, lambda rank: TensorDataset(values(rank), torch.arange(ROWS) % 3)
    ),
    "evaluated on all rows": lambda data: loaded(data, lambda rank: table(), evaluates=True),
}

#: Loops with a mistake, and the findings and notes.
BROKEN = {
    "a Subset of the rank": (lambda data: loaded(data, strided), {AGAIN}, set()),
    "a Subset of the rank in a data set": (
        lambda data: loaded(data, lambda rank: Changed(strided(rank))), {AGAIN}, set()),
    "a split of the rank's Subset": (
        lambda data: loaded(data, lambda rank: Subset(strided(rank), range(40))), {AGAIN}, set()),
    "a Subset of the rank is evaluated": (lambda data: loaded(data, strided, evaluates=True), {AGAIN}, set()),
    "files of the rank": (lambda data: loaded(data, lambda rank: Sharded(files_of(EVERY[rank::2]))), set(), {AGAIN}),
    "a part of its own kind": (
        lambda data: loaded(data, lambda rank: Sharded(files_of(EVERY)).shard(2, rank)), set(), {AGAIN}),
    "views of the rank": (lambda data: loaded(data, halves), set(), {AGAIN}),
    "a split of views of the rank": (
        lambda data: loaded(data, lambda rank: Subset(halves(rank), range(40))), set(), {AGAIN}),
    "parts of more ranks": (lambda data: loaded(data, split, num_replicas=4, rank=data.rank), set(), {UNREAD}),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_note(rank: Rank, name):
    findings, notes = titles(HEALTHY[name], rank, is_healthy=True)
    assert not findings and not notes


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, findings, notes = BROKEN[name]
    assert titles(loop, rank, is_healthy=True) == (findings, notes)


def _division(part, first, **changes):
    one = Division("Subset, DistributedSampler", 2, part, 8, {"the Subset": tuple(range(first, first + 8))}, {}, 0)
    return Read(divisions=[dataclasses.replace(one, **changes)])


def test_ranks_of_several_groups_have_data_of_their_own():
    groups = [_division(part, first) for first in (0, 8) for part in (0, 1)]
    assert not list(check_division(groups))
    assert [one.is_note for one in check_division([groups[0], groups[3]])] == [False]
    tensor_parallel = [_division(part, 0) for part in (0, 0, 1, 1)]
    assert not list(check_division(tensor_parallel))
    assert not list(check_division([_division(0, 0), _division(1, 4)]))  # which other notes judge


def test_rows_of_objects_are_not_read():
    rows = [(object(), one) for one in range(20)]
    found = division_of(rows, DistributedSampler(rows, num_replicas=2, rank=1), 0)
    assert found is not None and (found.parts, found.part, found.content) == (2, 1, {})
