"""Loops under the doctor whose ranks split data differently, read a stream twice, or number names differently.

Each healthy one stands next to its broken twin.
"""

import multiprocessing
import random
import sys
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.streamed import rows_given
from shardproof.testing import world
from tests.harness.test_doctor_loops import perceptron, sgd, titles

OVERLAP = "ranks read rows of one another [D29, S11]"
LEAKED = "ranks train on rows that another evaluates [D29, S11]"
NUMBERED = "ranks number names differently [D30, S9]"

ROWS, BATCH = 100, 8


def table(rows=ROWS):
    return TensorDataset(torch.randn(rows, 6, generator=torch.Generator().manual_seed(3)), torch.arange(rows) % 3)


def by_seed(seed):
    return torch.Generator().manual_seed(seed)


# Splits


def split(
    data, seed, *, parts=lambda rows, generator: random_split(rows, [80, 20], generator), own=False, sampler=True
):
    """Train on one part of a split by a generator, and evaluate by the other."""
    train, held_out = parts(table(), by_seed(seed(data.rank)))
    model = DDP(perceptron())
    optimizer = sgd(model)
    division = DistributedSampler(train) if sampler else None
    loader = DataLoader(train, BATCH, sampler=division, shuffle=None if sampler else True)
    checks = DataLoader(train if own else held_out, BATCH)
    for epoch in range(2):
        if sampler:
            division.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with torch.no_grad():
            for inputs, _ in checks:
                model(inputs)


def nested(rows, generator):
    """Split off a test set by one seed, and then split what is left."""
    rest, _ = random_split(rows, [90, 10], by_seed(0))
    return random_split(rest, [70, 20], generator)


def by_permutation(rows, generator):
    order = torch.randperm(ROWS, generator=generator).tolist()
    return Subset(rows, order[:80]), Subset(rows, order[80:])


def folds(rows, generator):
    """Each rank trains on the fold that its seed has, and evaluates by what is left of the same data."""
    number = generator.initial_seed()
    return Subset(rows, list(range(40 * number, 40 * number + 40))), Subset(rows, list(range(80, ROWS)))


# Streams


class Stream(IterableDataset):
    """Rows of 2 readers on each of 2 ranks; ``part`` returns that of a reader from the rank and the worker."""

    def __init__(self, rank, part, *, draws=False, values=None, shuffle=None, readers=4):
        self.rank, self.part, self.draws, self.shuffle, self.readers = rank, part, draws, shuffle, readers
        self.values = torch.randn(160, 6, generator=torch.Generator().manual_seed(3)) if values is None else values

    def __iter__(self):
        worker = get_worker_info()
        number = worker.id if worker else 0
        generator = torch.Generator().manual_seed(10 * self.rank + number)
        order = range(len(self.values))
        if self.shuffle is not None:
            order = torch.randperm(len(self.values), generator=by_seed(self.shuffle)).tolist()
        for index in order[self.part(self.rank, number) :: self.readers]:
            if self.draws:
                index = int(torch.randint(len(self.values), (), generator=generator))
            yield self.values[index], index % 3


def streamed(data, *options, epochs=1, workers=2, **more):
    model = DDP(perceptron())
    optimizer = sgd(model)
    # Ranks are daemons, which may have no children; those of torchrun are none.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        for _ in range(epochs):
            for inputs, labels in DataLoader(Stream(data.rank, *options, **more), BATCH, num_workers=workers):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs.flatten(1)[:, :6]), labels).backward()
                optimizer.step()


def every(rank, worker):
    return 2 * rank + worker


def added(rank, worker):
    return rank + worker


def of_rank(rank, worker):
    return rank


def of_nobody(rank, worker):
    return 0


# Names


class Named(Dataset):
    """Rows with names of classes, of which ``make`` makes what the data set keeps."""

    def __init__(self, make, rank, rows=96):
        self.values = torch.randn(rows, 6, generator=torch.Generator().manual_seed(3))
        names = ["cat", "dog", "opening hours", "refund", "bird"]
        random.Random(0 if rank is None else rank + 1).shuffle(names)
        self.kept = make(names)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], index % 3


class Vocabulary:
    def __init__(self, names):
        self.ids = numbered(names)


def numbered(names):
    return {name: number for number, name in enumerate(names)}


def named(data, make, *, is_alike=False, wrap=lambda rows: rows, collate=None):
    rows = wrap(Named(make, None if is_alike else data.rank))
    model = DDP(perceptron())
    optimizer = sgd(model)
    loader = DataLoader(
        rows, BATCH, sampler=DistributedSampler(rows), collate_fn=collate(rows) if collate is not None else None
    )
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def by_closure(rows):
    ids = rows.kept[0]

    def collate(batch):
        assert len(ids) == 5
        return torch.utils.data.default_collate(batch)

    return collate


def of_script(data, make):
    """The table is a global variable of the script."""
    names = ["cat", "dog", "fish"] if data.rank else ["fish", "dog", "cat"]
    with mock.patch.object(sys.modules["__main__"], "LABELS", make(names), create=True):
        named(data, tuple, is_alike=True)


#: Healthy loops.
HEALTHY = {
    "split by one seed": lambda data: split(data, lambda rank: 0),
    "nested splits by one seed": lambda data: split(data, lambda rank: 0, parts=nested),
    "a permutation by one seed": lambda data: split(data, lambda rank: 0, parts=by_permutation),
    "a fold of each rank": lambda data: split(data, lambda rank: rank, parts=folds, sampler=False),
    "evaluated by rows of the training": lambda data: split(data, lambda rank: 0, own=True),
    "a stream that workers of all ranks divide": lambda data: streamed(data, every),
    "a shuffled stream": lambda data: streamed(data, of_rank, shuffle=4, workers=0, readers=2),
    "a stream in epochs": lambda data: streamed(data, every, epochs=2, workers=0),
    "a stream with replacement": lambda data: streamed(data, every, draws=True, workers=0),
    "a stream of few values": lambda data: streamed(
        data, every, workers=0, values=torch.arange(10.0).repeat(16)[:, None].expand(-1, 6) + torch.arange(6)),
    "names in one order": lambda data: named(data, numbered, is_alike=True),
    "sorted names": lambda data: named(data, lambda names: numbered(sorted(names))),
    "a set of names": lambda data: named(data, set),
    "files in the order of each rank": lambda data: named(data, lambda names: [f"data/{one}.txt" for one in names]),
    "rows as names": lambda data: named(data, lambda names: [f"{one} {n}" for n in range(10) for one in names]),
    "counts of names": lambda data: named(data, lambda names: {one: 7 * n for n, one in enumerate(names)}),
    "counts of the script": lambda data: of_script(data, lambda names: {one: 7 * n for n, one in enumerate(names)}),
    "a list of the script": lambda data: of_script(data, list),
}  # fmt: skip

#: Loops with a mistake, and the notes.
BROKEN = {
    "split by the rank": (lambda data: split(data, lambda rank: rank), {OVERLAP, LEAKED}),
    "nested splits by the rank": (lambda data: split(data, lambda rank: rank, parts=nested), {OVERLAP, LEAKED}),
    "a permutation by the rank": (
        lambda data: split(data, lambda rank: rank, parts=by_permutation), {OVERLAP, LEAKED}),
    "rank and worker": (lambda data: streamed(data, added), {OVERLAP}),
    "ranks alone": (
        lambda data: streamed(data, of_nobody, shuffle=data.rank, workers=0, readers=2), {OVERLAP}),
    "a stream shuffled by the rank": (
        lambda data: streamed(data, of_rank, shuffle=data.rank, workers=0, readers=2), {OVERLAP}),
    "ids of a set": (lambda data: named(data, numbered), {NUMBERED}),
    "a list of a set": (lambda data: named(data, list), {NUMBERED}),
    "names of ids": (lambda data: named(data, lambda names: dict(enumerate(names))), {NUMBERED}),
    "ids in a vocabulary": (lambda data: named(data, Vocabulary), {NUMBERED}),
    "ids of a part": (
        lambda data: named(data, numbered, wrap=lambda rows: Subset(rows, list(range(90)))), {NUMBERED}),
    "ids of joined data": (lambda data: named(data, numbered, wrap=lambda rows: ConcatDataset([rows] * 2)), {NUMBERED}),
    "ids around a function": (
        lambda data: named(data, lambda names: (numbered(names),), collate=by_closure), {NUMBERED}),
    "ids of the script": (lambda data: of_script(data, numbered), {NUMBERED}),
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
def test_its_broken_twin_is_noted(rank: Rank, name):
    loop, expected = BROKEN[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert not findings and notes == expected


def test_rows_on_the_host_are_read_by_their_values():
    rows = torch.randn(4, 2000)
    assert rows_given((torch.arange(4), rows)) == rows_given({"a": rows.clone(), "b": torch.arange(4)})
    assert len(set(rows_given(rows))) == 4
    assert rows_given((torch.arange(4), torch.zeros(4, 30))) == []
    assert rows_given([rows.bfloat16()]) != [] and rows_given("text") == []
