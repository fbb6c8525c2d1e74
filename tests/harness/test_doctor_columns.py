"""Loops under the doctor whose ranks have some columns of an argument alike; each healthy one has a broken twin."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.labels import columns_of
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, perceptron, sgd, titles

ALIKE = "ranks have the same values in some columns [D9, S11]"

ROWS, VOCABULARY = 24, 40


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 1)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(1).tanh())


def trained(data, make, *, model=Tokens, repeats=1):
    """Train on what ``make`` returns from the rank, a generator of its own and one that is alike on all ranks."""
    model = DDP(model())
    optimizer = sgd(model)
    own, common = (torch.Generator().manual_seed(seed) for seed in (100 + data.rank, 7))
    for _ in range(STEPS):
        inputs = make(data.rank, own, common)
        for _ in range(repeats):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


def drawn(generator, columns=4, rows=ROWS):
    return torch.randint(VOCABULARY, (rows, columns), generator=generator)


def completed(rank, own, common, *, parts=lambda rank: rank, prompts=None):
    """Prompts of the rank, with the completions that one rank has made for all."""
    prompts = drawn(own, 3) if prompts is None else prompts(rank, own, common)
    number = parts(rank)
    return torch.cat([prompts, drawn(common, 4, 2 * ROWS)[number * ROWS : (number + 1) * ROWS]], 1)


def first(rank):
    return 0


def grouped(rank, own, common):
    """Six prompts, each of them four times in turn."""
    return drawn(own, 3, ROWS // 4).repeat_interleave(4, 0)


def system(rank, own, common):
    """A prompt that all rows have, positions, a few kinds of rows that come in one order, and padding."""
    prompt = torch.arange(5).expand(ROWS, 5)
    kinds = torch.randint(3, (ROWS, 1), generator=common)
    tokens = drawn(own).tril(1)  # of which rows have some and then zeros
    return torch.cat([prompt, kinds, torch.arange(ROWS)[:, None], tokens], 1)


def grid(rank, own, common):
    """Points of a grid, of which each rank has some lines."""
    lines, points = torch.meshgrid(torch.linspace(rank, rank + 0.9, 6), torch.linspace(0, 1, 8), indexing="ij")
    return torch.stack([lines.flatten(), points.flatten(), *torch.rand(4, 48, generator=own)], 1)


def noisy(seed):
    """Values of the rank in one tensor with noise."""

    def make(rank, own, common):
        noise = torch.randn(ROWS, 3, generator=own if seed == "own" else common)
        return torch.cat([torch.randn(ROWS, 3, generator=own), noise], 1)

    return make


def negatives(generators):
    """The positive of a row, and the negatives that are drawn for it."""
    return lambda rank, own, common: torch.cat([drawn(own, 1), drawn(own if generators == "own" else common, 5)], 1)


HEALTHY = {
    "completions of the rank": lambda data: trained(data, completed),
    "completions of the rank for groups": lambda data: trained(
        data, lambda *of: completed(*of, prompts=grouped), repeats=2),
    "a prompt, kinds, positions, padding": lambda data: trained(data, system),
    "lines of a grid": lambda data: trained(data, grid, model=perceptron),
    "noise of the rank": lambda data: trained(data, noisy("own"), model=perceptron),
    "negatives of the rank": lambda data: trained(data, negatives("own")),
}  # fmt: skip

BROKEN = {
    "completions of the first rank": lambda data: trained(data, lambda *of: completed(*of, parts=first)),
    "completions of the first rank for groups": lambda data: trained(
        data, lambda *of: completed(*of, parts=first, prompts=grouped), repeats=2),
    "prompts of the first rank": lambda data: trained(
        data, lambda *of: completed(*of, prompts=lambda rank, own, common: drawn(common, 3))),
    "noise by one seed": lambda data: trained(data, noisy("one"), model=perceptron),
    "negatives by one seed": lambda data: trained(data, negatives("one")),
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
    findings, notes = titles(BROKEN[name], rank, is_healthy=True)
    assert not findings and notes == {ALIKE}


def test_columns_of_any_tensor_have_numbers():
    values = drawn(torch.Generator().manual_seed(0), 2)
    table = torch.cat([values, torch.ones(ROWS, 1, dtype=torch.int64), torch.arange(ROWS)[:, None]], 1)
    numbers = columns_of(table, ROWS).tolist()
    assert [one % 2 for one in numbers] == [1, 1, 0, 0] and numbers[2] == 0 != numbers[3]
    assert numbers[:2] == columns_of(values, ROWS).tolist()
    assert len(columns_of(torch.randn(ROWS, 3, 30, 30), ROWS)) <= 128
    for other in (torch.ones(ROWS), torch.ones(3, 4), torch.ones(ROWS, 4, dtype=torch.bool), torch.ones(ROWS, 0)):
        assert len(columns_of(other, len(other))) == 0
