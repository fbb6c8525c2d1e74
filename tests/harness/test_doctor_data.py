"""Loops under the doctor with mistakes of data and labels that lie between steps, ranks and inputs.

Each healthy one stands beside its broken twin.
"""

import multiprocessing
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, perceptron, sgd, titles

OVERLAP = "ranks read rows of one another [D29, S11]"
REPEATED = "each epoch has the order of the first [D29, S11]"
WORKERS = "workers read the same rows [D29, S11]"
ROLLED = "labels are the inputs rolled [D30]"
COLUMNS = "labels are columns of another rank [D30]"
DRAWN_ALIKE = "ranks draw the same numbers [D9, S11]"
FIXED = "each step reads the same data [D9, S11]"

ROWS, BATCH = 96, 8


class Rows(Dataset):
    """Rows that come augmented, so that none is read twice with the same values."""

    def __init__(self, rank, size=ROWS):
        self.values = torch.randn(size, 6, generator=torch.Generator().manual_seed(3))
        self.generator = torch.Generator().manual_seed(rank)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index] + torch.randn(6, generator=self.generator) / 10, index % 3


class Parts(Sampler):
    """A sampler of user code: shuffles all rows, and takes every second one of the permutation."""

    def __init__(self, rank, seed=0, size=ROWS, shuffles=True):
        self.rank, self.seed, self.size, self.shuffles, self.epoch = rank, seed, size, shuffles, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + 100 * self.epoch)
        rows = torch.randperm(self.size, generator=generator) if self.shuffles else torch.arange(self.size)
        return iter(rows[self.rank :: 2].tolist())

    def __len__(self):
        return len(range(self.rank, self.size, 2))


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def loaded(data, make, *, epochs=2, sets_epoch=True, most=100, **options):
    """Train by a loader over some epochs; ``make`` returns its data set and sampler from the rank."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    rows, sampler = make(data.rank)
    loader = DataLoader(rows, **({"batch_size": BATCH} | options), sampler=sampler)
    for epoch in range(epochs):
        if sets_epoch and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for _, (inputs, labels) in zip(range(most), loader, strict=False):
            step(model, optimizer, inputs, labels)


def distributed(rank, **options):
    rows = Rows(rank, 90)  # which does not divide by the ranks and the batch
    return rows, DistributedSampler(rows, **options)


def parts(rank, **options):
    return Rows(rank), Parts(rank, **options)


def halves(rank, seed):
    """Data that are split at random into the parts of ranks."""
    return random_split(Rows(rank), [ROWS // 2] * 2, torch.Generator().manual_seed(seed))[rank], None


def own_rows(rank):
    """Data that ranks have loaded in parts, of which each shuffles its own."""
    rows = Rows(rank)
    return rows, RandomSampler(rows, generator=torch.Generator().manual_seed(rank))


def weighted(rank):
    generator = torch.Generator().manual_seed(rank)
    return Rows(rank), WeightedRandomSampler(torch.ones(ROWS), ROWS // 2, generator=generator)


def replaced(rank):
    rows, generator = Rows(rank), torch.Generator().manual_seed(rank)
    return rows, RandomSampler(rows, replacement=True, num_samples=ROWS // 2, generator=generator)


def validated(data):
    """After each epoch all ranks evaluate on the same rows, which no sampler divides."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    rows, sampler = distributed(data.rank)
    held_out = DataLoader(Rows(data.rank), BATCH, shuffle=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in DataLoader(rows, BATCH, sampler=sampler):
            step(model, optimizer, *batch)
        with torch.no_grad():
            for inputs, _ in held_out:
                model(inputs)


def twice(data):
    """Two trainings in one process from the same seeds, which have the same order."""
    for _ in range(2):
        loaded(data, distributed, epochs=1)


# Permutations of user code


def permuted(data, draw, *, epochs=3, noise=True, draws_alone=False):
    """Train on rows of a permutation, of which a rank takes its part; one rank may draw numbers between epochs."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model = DDP(perceptron())
    optimizer = sgd(model)
    rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3))
    for _ in range(epochs):
        for part in torch.as_tensor(draw(data.rank)).split(BATCH):
            step(model, optimizer, rows[part] + data.noise(len(part), 6) * noise, part % 3)
        if draws_alone and data.rank == 0:
            torch.randn(3), random.random(), np.random.rand()


def by_torch(rank):
    return torch.randperm(ROWS)[rank::2]


def by_seed(seed):
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))


def of_own_rows(rank):
    return torch.randperm(ROWS // 2, generator=torch.Generator().manual_seed(rank)) + rank * ROWS // 2


def by_random(rank):
    order = list(range(ROWS))
    random.shuffle(order)
    return order[rank::2]


def by_numpy(rank):
    return np.random.permutation(ROWS)[rank * ROWS // 2 : (rank + 1) * ROWS // 2]


def mixed_up(data):
    """Rows are mixed with a permutation of the batch, which each rank draws."""
    torch.manual_seed(data.rank)
    model = DDP(perceptron())
    optimizer = sgd(model)
    for _ in range(2 * STEPS):
        inputs, labels = data.noise(16, 6), torch.arange(16) % 3
        step(model, optimizer, inputs + inputs[torch.randperm(16)] / 2, labels)


def rollouts(data):
    """Rollouts of each rank, whose minibatches are of its own permutation."""
    torch.manual_seed(data.rank)
    model = DDP(perceptron())
    optimizer = sgd(model)
    for _ in range(3):
        states = data.noise(32, 6)
        for part in torch.randperm(32).split(BATCH):
            step(model, optimizer, states[part], part % 3)


def drawn_rows(data, *, replaces=True, size=64):
    """Rows of common data that each rank draws by itself in each step, or once each."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    rows = torch.randn(size, 6, generator=torch.Generator().manual_seed(3))
    generator = np.random.default_rng(data.rank)
    order = generator.permutation(size)
    for number in range(STEPS):
        part = generator.integers(0, size, 16) if replaces else order[16 * number : 16 * number + 16]
        step(model, optimizer, rows[part], torch.as_tensor(part) % 3)


# Data without rows that have numbers


class Stream(IterableDataset):
    """Rows that workers divide, or that each of them reads."""

    def __init__(self, rank, divides):
        self.rank, self.divides = rank, divides

    def __iter__(self):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(self.rank)
        for number in range(4 * ROWS):
            values = torch.randn(6, generator=generator)
            if not self.divides or number % worker.num_workers == worker.id:
                yield values, number % 3


def streamed(data, divides):
    # Ranks are daemons, which may have no children; those of torchrun are none.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        loaded(data, lambda rank: (Stream(rank, divides), None), epochs=1, most=6, num_workers=2)


# Arguments of a forward


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(12, 6)

    def forward(self, values, times, *others):
        return self.net(torch.cat([values, times[:, None] * torch.ones(6)], 1))


def noised(data, *, seed, draws=torch.rand, more=None, alike=False):
    """Predict what was added to the data, at times that each rank draws."""
    model = DDP(Denoiser())
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(seed)
    for number in range(STEPS):
        times = draws(16, generator=generator)
        values = torch.ones(16, 6) * number if alike else data.noise(16, 6)
        optimizer.zero_grad()
        (model(values, times, *(() if more is None else more(number))) - values).square().mean().backward()
        optimizer.step()


def integers(size, generator):
    return torch.randint(1000, (size,), generator=generator)


def positions(number):
    return torch.arange(16 + number).expand(16, -1), torch.tensor(number), torch.ones(16, 8 + number)


# Labels


class Causal(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(-2))


def text(data, labels_of, *, vocabulary=50, tokens=None, shape=(8, 12)):
    """A language model; ``labels_of`` makes inputs and labels from tokens, of which rows have one more."""
    model = DDP(Causal(vocabulary))
    optimizer = sgd(model)
    for _ in range(STEPS):
        rows, length = shape
        if tokens is None:
            drawn = torch.randint(vocabulary, (rows, length + 1), generator=data.generator)
        else:
            drawn = tokens(torch.randint(vocabulary, (rows, 1), generator=data.generator), length + 1, vocabulary)
        inputs, labels = labels_of(drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()


def shifted(tokens):
    return tokens[:, :-1], tokens[:, 1:]


def rolled(tokens, *, ignores=False):
    labels = tokens.roll(-1, 1)
    if ignores:
        labels[:, -1] = -100
    return tokens, labels


def rolled_in_parts(tokens):
    """Each rank has a part of each row, in which labels are rolled."""
    part = tokens[:, :-1].chunk(2, 1)[dist.get_rank()]
    return part, part.roll(-1, 1)


def rolled_before_parts(tokens):
    inputs, labels = shifted(tokens)
    return (one.chunk(2, 1)[dist.get_rank()] for one in (inputs, labels))


def packed(tokens):
    """All rows in one sequence of one dimension, cut into rows for the labels alone."""
    return tokens.flatten(), tokens.roll(-1, 1).flatten()


def first_dimension(tokens):
    """Rows along the second dimension, as recurrent networks have them."""
    return tokens.t().contiguous(), tokens.t().roll(-1, 0)


def copied(tokens):
    return tokens, tokens


def counting(start, length, vocabulary):
    return (start + torch.arange(length)) % vocabulary


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, left, right):
        return self.left(left), self.right(right)


class Gathered(torch.autograd.Function):
    """Rows of both ranks; ``first`` may be a rank's own ones."""

    @staticmethod
    def forward(ctx, rows, own_first):
        every = [torch.empty_like(rows) for _ in range(2)]
        dist.all_gather(every, rows)
        ctx.number = 0 if own_first else dist.get_rank()
        return torch.cat(every if not own_first or dist.get_rank() == 0 else every[::-1])

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(2)[ctx.number] * 2, None


def contrastive(data, offset, *, own_first=False, rows=8):
    """Pairs of two towers, among the columns of all ranks."""
    model = DDP(Towers())
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        left, right = model(data.noise(rows, 6), data.noise(rows, 6))
        every = Gathered.apply(right, own_first)
        F.cross_entropy(left @ every.t(), torch.arange(rows) + offset(data.rank)).backward()
        optimizer.step()


#: Loops and the note that they get; none of the healthy ones.
HEALTHY = {
    "shuffled": (lambda data: loaded(data, distributed), ""),
    "shuffled, the rest dropped": (lambda data: loaded(data, lambda r: distributed(r, drop_last=True)), ""),
    "in order": (lambda data: loaded(data, lambda r: distributed(r, shuffle=False), epochs=3), ""),
    "permutation of all ranks": (lambda data: loaded(data, parts), ""),
    "permutation of all ranks, cut short": (lambda data: loaded(data, parts, most=4), ""),
    "sampler of user code in order": (lambda data: loaded(data, lambda r: parts(r, shuffles=False)), ""),
    "random parts by one seed": (lambda data: loaded(data, lambda r: halves(r, 0), shuffle=None), ""),
    "rows of each rank": (lambda data: loaded(data, own_rows), ""),
    "weighted": (lambda data: loaded(data, weighted), ""),
    "with replacement": (lambda data: loaded(data, replaced), ""),
    "validated": (validated, ""),
    "two trainings": (twice, ""),
    "permutations of all ranks": (lambda data: permuted(data, by_torch), ""),
    "lists of all ranks": (lambda data: permuted(data, by_random), ""),
    "permutations by rank of its own rows": (lambda data: permuted(data, of_own_rows), ""),
    "mixed up": (mixed_up, ""),
    "rollouts": (rollouts, ""),
    "drawn with replacement": (drawn_rows, ""),
    "stream that workers divide": (lambda data: streamed(data, True), ""),
    "times by rank": (lambda data: noised(data, seed=data.rank), ""),
    "positions": (lambda data: noised(data, seed=data.rank, more=positions), ""),
    "one time for all rows": (
        lambda data: noised(data, seed=0, draws=lambda n, generator: torch.rand((), generator=generator).expand(n)),
        ""),
    "shifted": (lambda data: text(data, shifted), ""),
    "rolled and ignored": (lambda data: text(data, lambda one: rolled(one, ignores=True)), ""),
    "shifted before parts": (lambda data: text(data, rolled_before_parts, shape=(8, 24)), ""),
    "counting round": (lambda data: text(data, shifted, vocabulary=12, tokens=counting), ""),
    "copied": (lambda data: text(data, copied), ""),
    "columns of the rank": (lambda data: contrastive(data, lambda r: 8 * r), ""),
    "columns of the rank first": (lambda data: contrastive(data, lambda r: 0, own_first=True), COLUMNS),
}  # fmt: skip

#: Loops with a mistake, and the note.
BROKEN = {
    "permutation by rank": (lambda data: loaded(data, lambda r: parts(r, seed=r)), OVERLAP),
    "permutation by rank, cut short": (lambda data: loaded(data, lambda r: parts(r, seed=r), most=4), OVERLAP),
    "seed of the sampler by rank": (lambda data: loaded(data, lambda r: distributed(r, seed=r)), OVERLAP),
    "rank of the sampler": (
        lambda data: loaded(data, lambda r: (Rows(r), Parts(0, seed=0 if r else 3))), OVERLAP),
    "random parts by a seed of the rank": (lambda data: loaded(data, lambda r: halves(r, r)), OVERLAP),
    "subset by rank": (
        lambda data: loaded(data, lambda r: (Subset(Rows(r), by_seed(r)[r::2].tolist()), None)), OVERLAP),
    "set_epoch() left out": (lambda data: loaded(data, distributed, sets_epoch=False), REPEATED),
    "set_epoch() left out of user code": (lambda data: loaded(data, parts, sets_epoch=False), REPEATED),
    "permutations go apart": (lambda data: permuted(data, by_torch, draws_alone=True), OVERLAP),
    "lists go apart": (lambda data: permuted(data, by_random, draws_alone=True), OVERLAP),
    "permutations of numpy go apart": (lambda data: permuted(data, by_numpy, draws_alone=True), OVERLAP),
    "permutations by rank": (lambda data: permuted(data, lambda r: by_seed(r)[r::2]), OVERLAP),
    "rows of common data by rank": (lambda data: drawn_rows(data, replaces=False), OVERLAP),
    "stream that workers read": (lambda data: streamed(data, False), WORKERS),
    "times by one seed": (lambda data: noised(data, seed=0), DRAWN_ALIKE),
    "integer times by one seed": (lambda data: noised(data, seed=0, draws=integers), DRAWN_ALIKE),
    "times by one seed with positions": (lambda data: noised(data, seed=0, more=positions), DRAWN_ALIKE),
    "rolled": (lambda data: text(data, rolled), ROLLED),
    "rolled in parts": (lambda data: text(data, rolled_in_parts, shape=(8, 24)), ROLLED),
    "rolled along the first dimension": (lambda data: text(data, first_dimension), ROLLED),
    "columns of the first rank": (lambda data: contrastive(data, lambda r: 0), COLUMNS),
    "columns of a rank without its rows": (lambda data: contrastive(data, lambda r: r), COLUMNS),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_note(rank: Rank, name):
    loop, note = HEALTHY[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert not findings and notes == ({note} if note else set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_noted(rank: Rank, name):
    loop, note = BROKEN[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert not findings and note in notes
