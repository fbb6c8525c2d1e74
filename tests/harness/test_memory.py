"""The census of tensors: what counts, and that garbage does not; what is freed where models are kept."""

import threading
import weakref

import pytest
import torch
from torch import nn

from shardproof.harness.tensors import devices, memory

CPU = torch.device("cpu")
NUMEL = 1000


class Keep(torch.autograd.Function):
    """A node that holds an object, as an implementation's hooks hold its units."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def cycles_through_autograd(layers):
    """Garbage of which each collection finds one layer only."""
    x = torch.ones(NUMEL, requires_grad=True)
    for _ in range(layers):
        kept = {}
        kept["output"] = x = Keep.apply(x, kept)


def test_garbage_behind_nodes_of_autograd_is_not_counted():
    before = memory.held_bytes(CPU)
    cycles_through_autograd(5)
    assert memory.held_bytes(CPU) == memory.tensor_bytes(CPU) == before


class Raise(torch.autograd.Function):
    """A node whose backward raises, while others are ready to run."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("raised in backward")


def test_a_backward_that_raised_keeps_nothing():
    before = memory.held_bytes(CPU)
    # The node that raises is the younger of the two that are ready after the first.
    x, kept = torch.ones(NUMEL, requires_grad=True), torch.ones(NUMEL)
    with pytest.raises(RuntimeError, match="raised in backward"):
        (Keep.apply(x, kept) + Raise.apply(x)).sum().backward()
    kept = weakref.ref(kept)
    del x
    memory.collect_garbage()
    assert kept() is not None, "autograd keeps nothing after an error any more: finish_backward has less to do"
    assert memory.held_bytes(CPU) == before
    assert kept() is None


def test_what_a_thread_drops_a_moment_later_is_not_held():
    """As gloo's threads do with the tensors of a collective that has ended."""
    before = memory.held_bytes(CPU)
    kept = [torch.ones(NUMEL)]
    thread = threading.Timer(0.1, kept.clear)
    thread.start()
    assert memory.settled_bytes(CPU, limit=before) == before
    thread.join()


def test_what_stays_is_held(monkeypatch):
    monkeypatch.setattr(memory, "_GLOO_SECONDS", 0.05)
    before = memory.held_bytes(CPU)
    kept = torch.ones(NUMEL)
    assert memory.settled_bytes(CPU, limit=before) - before == kept.nbytes
    assert memory.settled_bytes(CPU, limit=before + kept.nbytes) - before == kept.nbytes


def test_each_storage_counts_once():
    before = memory.held_bytes(CPU)
    whole = torch.zeros(NUMEL)
    parts = [whole[:10], whole.view(10, -1)]
    assert memory.held_bytes(CPU) - before == NUMEL * whole.element_size()
    assert memory.bytes_of([whole, whole]) == NUMEL * whole.element_size()
    del whole, parts
    assert memory.held_bytes(CPU) == before


def test_all_tensors_are_freed_however_they_are_nested():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    state = {parameter: {"momentum": torch.ones(4), "step": 3}, "names": ["weight"]}
    view = torch.ones(2, 4)[0]
    memory.free([(parameter, parameter.grad, None), state, {"views": [view]}])
    tensors = [parameter, parameter.grad, state[parameter]["momentum"], view]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 4


def test_memory_of_others_stays():
    """Pinned memory cannot be resized either, and there is none without a device."""
    tensor = torch.frombuffer(bytearray(16), dtype=torch.float32)
    memory.free([tensor])
    assert tensor.tolist() == [0.0] * 4


# How long a stream is occupied


class Clock:
    """Stands for a device of 2,000 cycles a millisecond, whose every third kernel waits 7 ms for another process."""

    def __init__(self):
        self.now, self.kernels = 0.0, []

    def sleep(self, cycles):
        self.kernels.append(cycles)
        self.now += cycles / 2000 + (0.0 if len(self.kernels) % 3 else 7.0)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    devices._cycles_per_millisecond.cache_clear()
    yield clock
    devices._cycles_per_millisecond.cache_clear()


def test_turns_of_other_processes_make_no_occupation_shorter(clock):
    """And the clock is measured once."""
    devices.occupy(20, device_type="cuda")
    measured = len(clock.kernels) - 1
    devices.occupy(5, device_type="cuda")
    assert clock.kernels[measured:] == [40_000, 10_000]
