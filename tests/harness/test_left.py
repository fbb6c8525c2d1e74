"""Gradients that are gone before an optimizer steps by them are noticed, and no device is waited for in a step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardproof.harness.tensors import memory
from shardproof.harness.training.doctor import doctor
from shardproof.harness.watching import left

#: What makes the host wait for a device.
WAITS = ("tolist", "item", "equal", "cpu", "__bool__", "__float__", "__int__")

STEPS = 3


def batches():
    made = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 6, generator=made), torch.randint(3, (4,), generator=made)


#: By name, how user code clears a gradient.
CLEARS = {
    "None": lambda one: setattr(one, "grad", None),
    "zero_": lambda one: one.grad.zero_(),
    "zero_ of data": lambda one: one.grad.data.zero_(),
    "another": lambda one: setattr(one, "grad", torch.zeros_like(one)),
    "nothing": lambda one: None,
}


@pytest.fixture(params=[True, False], ids=["host", "device"])
def is_on_host(request, monkeypatch):
    monkeypatch.setattr(left, "is_on_host", lambda tensor: request.param)
    return request.param


@pytest.fixture
def waits(monkeypatch):
    """The names of functions that were called and wait for a device."""
    called = []
    for owner, name in [*((torch.Tensor, name) for name in WAITS), (torch, "equal")]:
        before = getattr(owner, name)

        def noted(*args, before=before, name=name, **kwargs):
            called.append(name)
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    return called


def train(clear, skipped, waits):
    """Train with two microbatches a step, and return what is found; before a step gradients may be cleared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, found = batches(), []
    with doctor(model, optimizer, on_finding="collect", steps=range(STEPS)) as watching:
        for step in range(STEPS):
            del waits[:]
            for _ in range(2):
                inputs, labels = next(data)
                F.cross_entropy(model(inputs), labels).backward()
            if step == skipped:
                for one in model.parameters():
                    clear(one)
                for inputs, labels in (next(data), next(data)):
                    F.cross_entropy(model(inputs), labels).backward()
            found += waits
            optimizer.step()
            optimizer.zero_grad()
    return [one.render() for one in watching.findings], found


@pytest.mark.parametrize("name", CLEARS)
def test_gradients_that_are_gone_are_noticed_however_they_are_cleared(name, is_on_host):
    told = "note: step 1: gradients are dropped without a step [D11, S4]" if name != "nothing" else ""
    found, _ = train(CLEARS[name], 1, [])
    assert [one.splitlines()[0] for one in found] == [told] * bool(told)


def test_no_device_is_waited_for_between_microbatches(waits, monkeypatch):
    monkeypatch.setattr(left, "is_on_host", lambda tensor: False)
    assert train(None, None, waits) == ([], [])
    monkeypatch.setattr(left, "is_on_host", lambda tensor: True)
    assert set(train(None, None, waits)[1]) == {"tolist"}


@pytest.mark.parametrize("name", ["None", "zero_", "zero_ of data", "another"])
def test_a_rank_alone_is_asked_at_once_where_user_code_is_seen_to_clear(name, monkeypatch):
    """Of what torch counts no version of, the end of the step tells."""
    monkeypatch.setattr(left, "is_on_host", lambda tensor: False)
    known = []
    before = left.Left.gone

    def gone(self, *, is_last):
        for one in before(self, is_last=is_last):
            known.append(is_last)
            yield one

    monkeypatch.setattr(left.Left, "gone", gone)
    train(CLEARS[name], 1, [])
    assert known == [name == "zero_ of data"]


def test_a_backward_of_another_model_leaves_no_tensor():
    """As a census of memory runs one: beside a tiny model, the bits of its parameters are more than a share."""
    torch.manual_seed(0)
    model = nn.Linear(15, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = memory.held_bytes(torch.device("cpu"))
    with doctor(model, optimizer, on_finding="collect", steps=range(STEPS)):
        assert memory.held_bytes(torch.device("cpu")) == before
        for _ in range(2):
            model(torch.randn(4, 15)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("is_root_called", [True, False])
def test_weights_that_are_perturbed_between_passes_are_known_by_the_first_backward(is_root_called):
    """A loop that calls parts of the model has no forward of the root, and its second pass replaces the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches()
    with doctor(model, optimizer, on_finding="collect", steps=range(STEPS)) as watching:
        for _ in range(STEPS):
            inputs, labels = next(data)
            before = [one.detach().clone() for one in model.parameters()]
            for _ in range(2):
                optimizer.zero_grad()
                output = model(inputs) if is_root_called else model[2](model[1](model[0](inputs)))
                F.cross_entropy(output, labels).backward()
                with torch.no_grad():
                    for one in model.parameters():
                        one.add_(one.grad, alpha=0.05)
            with torch.no_grad():
                for one, value in zip(model.parameters(), before, strict=True):
                    one.copy_(value)
            optimizer.step()
    assert [one.render() for one in watching.findings] == []
