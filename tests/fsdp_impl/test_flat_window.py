"""Unsharded buffers whose compute may still be running: when their bytes may go to another gather."""

import gc
import weakref

import pytest
import torch

from fsdp_impl.common import streams
from fsdp_impl.flat.group import FlatBuffer, FlatContext

CPU = torch.device("cpu")


class Event:
    def __init__(self, name: str, *, passed: bool = False) -> None:
        self.name, self.passed = name, passed

    def query(self) -> bool:
        return self.passed


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the events that streams are made to wait for."""
    found: list[str] = []
    monkeypatch.setattr(streams, "wait", lambda stream, event: found.append(event.name) if event else None)
    return found


def buffers(context: FlatContext, count: int) -> list[FlatBuffer]:
    made = [FlatBuffer(4, torch.float32, CPU, context) for _ in range(count)]
    for buffer in made:
        buffer.allocate()
    return made


def test_a_new_buffer_has_no_bytes_so_that_the_first_are_the_gather_streams() -> None:
    assert not FlatBuffer(4, torch.float32, CPU, FlatContext(CPU)).is_allocated


def test_the_latest_stays_and_the_gather_stream_waits_for_the_others(waits: list[str]) -> None:
    context = FlatContext(CPU)
    a, b, c = buffers(context, 3)
    for buffer, name in ((a, "a"), (b, "b"), (c, "c")):
        context.retire(buffer, Event(name))
    context.release_retired(ahead=False)
    assert waits == ["a", "b"]
    assert [buffer.is_allocated for buffer in (a, b, c)] == [False, False, True]
    context.release_all_retired()
    assert waits == ["a", "b", "c"] and not c.is_allocated


def test_a_gather_that_is_issued_ahead_waits_for_all(waits: list[str]) -> None:
    context = FlatContext(CPU)
    a, b = buffers(context, 2)
    for buffer, name in ((a, "a"), (b, "b")):
        context.retire(buffer, Event(name))
    context.release_retired(ahead=True)
    assert waits == ["a", "b"] and not a.is_allocated and not b.is_allocated


def test_without_a_limit_bytes_go_back_once_the_device_is_done(waits: list[str]) -> None:
    context = FlatContext(CPU, limits_gathers=False)
    a, b, c = buffers(context, 3)
    for buffer, passed in ((a, True), (b, False), (c, True)):
        context.retire(buffer, Event("x", passed=passed))
    context.release_retired(ahead=False)
    # The device passes events in order; what is behind one that it has not passed is not asked for.
    assert [buffer.is_allocated for buffer in (a, b, c)] == [False, True, True]


def test_a_buffer_that_is_wanted_again_is_written_after_it_was_read(waits: list[str]) -> None:
    context = FlatContext(CPU)
    (a,) = buffers(context, 1)
    context.retire(a, Event("a"))
    a.target.fill_(1)
    a.allocate()
    assert waits == ["a"] and a.is_allocated
    context.release_all_retired()
    assert a.is_allocated and waits == ["a"]


def test_the_tensors_outlive_the_bytes_and_do_not_see_each_others_versions() -> None:
    context = FlatContext(CPU)
    (a,) = buffers(context, 1)
    version = a.leaf._version
    a.target.fill_(3)
    assert a.leaf.tolist() == [3] * 4 and a.leaf._version == version
    a.free()
    assert a.leaf.untyped_storage().size() == 0 and a.leaf.numel() == 4
    a.allocate()
    a.target.fill_(5)
    assert a.leaf.tolist() == [5] * 4


def test_a_deleted_window_frees_what_it_holds_without_the_garbage_collector() -> None:
    """As where a model is moved after a forward, which retires buffers, and then deleted."""
    gc.disable()
    try:
        context = FlatContext(CPU)
        held = buffers(context, 1)
        context.retire(held[0], Event("a"))
        references = [weakref.ref(context), weakref.ref(held.pop())]
        del context
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
