"""Streams of the reference on an accelerator, where there is one, and what stands in their place on the CPU."""

from typing import Any

import pytest
import torch

from fsdp_impl.common import streams
from fsdp_impl.common.streams import CommContext

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_the_cpu_has_none() -> None:
    device = torch.device("cpu")
    assert streams.create(device) is None and streams.current(device) is None
    with streams.use(None), streams.use(None):
        pass


@pytest.mark.parametrize("copying", [("first",), ("last",), ()])
def test_the_host_waits_for_all_reductions_if_any_is_copied_to_it(
    monkeypatch: pytest.MonkeyPatch, copying: tuple[str, ...]
) -> None:
    class Event:
        def synchronize(self) -> None:
            waited.append(self)

    waited: list[Event] = []
    monkeypatch.setattr(streams, "wait", lambda stream, event: None)
    context, events = CommContext(torch.device("cpu")), {"first": Event(), "last": Event()}
    for step in range(2):
        for name, event in events.items():
            stream: Any = name
            context.note_reduced(stream, event, host_waits=name in copying)  # type: ignore[arg-type]
        context.finish_reductions()
        assert waited == (step + 1) * (list(events.values()) if copying else [])
    context.finish_reductions()
    assert len(waited) == 2 * 2 * bool(copying), "a backward without reductions waits for earlier ones"


@needs_gpu
def test_a_stream_is_current_inside_the_block_alone() -> None:
    device = torch.device("cuda", 0)
    before = streams.current(device)
    one, other = streams.create(device), streams.create(device, priority=streams.HIGH_PRIORITY)
    with streams.use(one):
        assert streams.current(device) == one
        with streams.use(other), streams.use(one):
            assert torch.cuda.current_stream() == one
        assert streams.current(device) == one
    with pytest.raises(KeyError), streams.use(other):
        raise KeyError
    assert streams.current(device) == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_a_stream_of_another_device_leaves_the_current_device_as_it_was() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    stream = streams.create(second)
    before = streams.current(first), streams.current(second)
    with torch.cuda.device(first), streams.use(stream):
        assert streams.current(second) == stream
    assert (streams.current(first), streams.current(second)) == before
    assert torch.cuda.current_device() == first.index
