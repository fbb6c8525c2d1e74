"""What is compiled under the doctor: its graphs stay as they are, and the summary names the modules."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from shardproof.harness.training.doctor import doctor
from tests.harness.test_doctor import Traces

STEPS = 5


class Block(nn.Module):
    """A part with parts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).tanh())


class Net(nn.Module):
    """Seven blocks, called by a function that may be compiled, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head, self.run = nn.ModuleList(Block() for _ in range(7)), nn.Linear(4, 2), self.through

    def through(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs

    def forward(self, inputs):
        return self.head(self.run(inputs))


def in_place(model, **options):
    model.compile(**options)
    return model


def blocks_in_place(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def blocks_wrapped(model, **options):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, **options)
    return model


def a_function_in_it(model, **options):
    model.run = torch.compile(model.through, **options)
    return model


SEVEN = "'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3', 'blocks.4' and 2 more"
COMPILED = "compiled, so D16 does not see their outputs, nor D14 the values that they compute with"
CALLED = "called in a compiled function or not at all, so D14 and D16 do not see their forward"

#: How a model is compiled, and what the summary says of it.
COMPILES = {
    "nothing": (lambda model, **_: model, None),
    "module": (torch.compile, f"inside of 'the model': {COMPILED}"),
    "module in place": (in_place, f"inside of 'the model': {COMPILED}"),
    "blocks": (blocks_wrapped, f"inside of {SEVEN}: {COMPILED}"),
    "blocks in place": (blocks_in_place, f"inside of {SEVEN}: {COMPILED}"),
    "a function in it": (a_function_in_it, f"inside of {SEVEN}: {CALLED}"),
}


def train(compiles, is_around=False, **options):
    """Train a new model; the losses, and the graphs and breaks that dynamo counts."""
    torch.compiler.reset()
    counters.clear()
    model = Net() if is_around else compiles(Net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(inputs):
        return model(inputs).square().mean()

    if is_around:
        loss_of = compiles(loss_of, **options)
    losses = []
    for step in range(STEPS):
        loss = loss_of(torch.full((2, 4), 1.0 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.fixture
def traces():
    # The doctor would wait, with a hook, for the roots of optimizers that earlier tests have left in circles.
    gc.collect()
    made = Traces(nn.Linear(1, 1))
    yield made
    made.assert_none()
    torch.compiler.reset()
    counters.clear()


DAILY = {("a function in it", "fullgraph")}

#: With the backend that compiles backward too, and in one graph, which a hook that broke it would refuse: that of the
#: standard run has hooks inside of what is compiled; the others are of the night.
WAYS = {
    f"{name}-{label}": pytest.param(name, backend, is_full, marks=[] if (name, label) in DAILY else pytest.mark.nightly)
    for name in COMPILES
    for label, backend, is_full in [
        ("fullgraph", "aot_eager", True),
        ("eager", "eager", False),
        ("eager-fullgraph", "eager", True),
    ]
}


@pytest.mark.parametrize(("name", "backend", "is_full"), WAYS.values(), ids=WAYS)
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_modules_are_named_and_keep_their_graphs(name, backend, is_full, traces):
    """Of a function, whose modules have hooks for three steps, there is one graph more."""
    compiles, said = COMPILES[name]
    options = {"backend": backend, "fullgraph": is_full}
    losses, graphs, breaks = train(compiles, **options)
    with doctor(on_finding="collect") as watching:
        watched, more, others = train(compiles, **options)
    assert (watched, others) == (losses, breaks) == (losses, {})
    assert more == graphs + (name == "a function in it")
    told = [line.strip() for line in watching.summary().splitlines() if "inside of '" in line]
    assert told == ([f"not seen  {said}"] if said else []) and not watching.findings
    assert "steps 0-2 of 1 rank, Net, 30 parameters" in watching.summary()
    assert "1 different microbatches, 1 a step" in watching.summary()


@pytest.mark.parametrize("is_full", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["", "fullgraph"])
def test_a_compiled_function_around_the_model_trains_as_it_does_alone(is_full, traces, capsys):
    options = {"backend": "aot_eager", "fullgraph": is_full}
    alone = train(torch.compile, is_around=True, **options)
    capsys.readouterr()
    with doctor():
        watched = train(torch.compile, is_around=True, **options)
    assert watched == alone
    line = "nothing was watched: optimizers stepped, and no forward of Net was seen, as inside of a compiled function: "
    assert line in capsys.readouterr().err
