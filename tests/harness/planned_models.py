"""Models and what is no model, for ``--model tests.harness.planned_models:NAME``."""

import gc

import pytest
import torch
from torch import nn

from shardproof.harness.planning import presets
from shardproof.harness.planning.presets import Shape
from shardproof.harness.tensors import memory

VOCAB, DIM = 64, 32
#: What ``inputs`` is called with, whatever the command says of tokens.
WIDTH = 8

NO_FUNCTION = 3


@pytest.fixture(autouse=True, scope="module")
def objects_of_others_rest():
    """A simulation collects garbage between its steps: walking over all of torch each time would take most of it."""
    memory.retire_objects()
    yield
    gc.unfreeze()


def _shape(family, **changes):
    sizes = {"layers": 2, "dim": DIM, "heads": 4, "key_heads": 4, "hidden": 64, "vocab": VOCAB, "tied": False}
    return Shape(family=family, length=16, like="a small one", **(sizes | changes))


def gpt():
    return presets.build(_shape("gpt"), 16)


def tied():
    return presets.build(_shape("gpt", tied=True), 16)


def llama():
    return presets.build(_shape("llama", key_heads=2), 16)


def odd():
    """Sizes that no number of ranks divides."""
    return presets.build(_shape("gpt", vocab=61, hidden=37), 16)


def one_layer():
    """No blocks that repeat, no tokens, a loss of its own."""
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh())
    return model, lambda batch, sequence: (torch.zeros(batch, WIDTH),), lambda output, given: output.square().mean()


def two_lists():
    model = nn.Module()
    model.encoder = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    model.heads = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model.norm = nn.LayerNorm(4)
    return model


def of_data(path, *, size=3):
    raise AssertionError("it must not be called")


def of_a_file():
    with open("no/such/file") as file:
        return nn.Linear(int(file.read()), 3)


def of_values():
    return nn.Linear(int(torch.ones(3).sum()), 3)


def no_model():
    return "a model"


def no_parameters():
    return nn.ReLU()


class Reads(nn.Module):
    """Its forward depends on a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(VOCAB, 3)

    def forward(self, tokens):
        output = self.layer(tokens)
        return output if output.sum() > 0 else -output


class Flat(Reads):
    """Returns no logits."""

    def forward(self, tokens):
        return self.layer(tokens).mean()
