"""The timeline of an iteration in docs/reference.md is what the code queues, and waits for, in that order."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fsdp_impl import fully_shard
from fsdp_impl.common import collectives, ranges, streams
from fsdp_impl.per_parameter.reduction import Accumulator, Reducer
from fsdp_impl.per_parameter.unit import Unit
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world

PAGE = Path(__file__).parents[2] / "docs/reference.md"
#: The columns, and their widths.
COLUMNS = {"host": 25, "gather": 20, "current": 24, "reduce": 24, "all-reduce": 24}
#: In the order in which a context makes them.
STREAMS = ["gather", "reduce", "all-reduce"]
HOST = {
    "pre_forward": "pre-forward",
    "post_forward": "post-forward",
    "_pre_backward": "gradient of output",
    "_post_backward": "gradients of inputs",
    "_end_of_backward": "end of backward",
}


class _Event(NamedTuple):
    """Marks the latest entry of a stream."""

    marked: str


class Timeline:
    """Stand-ins for streams, which note what is queued on each.

    Attributes:
        rows: a line for each entry, in the order of the host.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[str] = []
        self._patch = patch
        self._made: list[str] = []
        self._current = ["current"]
        self._latest: dict[str, str] = {}
        self._host: list[str] = []
        self._noted = ""
        for name in ("create", "current", "use", "record", "wait", "join"):
            patch.setattr(streams, name, getattr(self, f"_{name}" if name != "current" else "_now"))
        patch.setattr(ranges, "named", self._named)
        for name, said in (("gather", "gather"), ("reduce", "reduce-scatter"), ("all_reduce", "all-reduce")):
            self._note_before(collectives, name, lambda args, unit, said=said: f"{said} {unit}")
        self._note_before(collectives, "reshard", lambda args, unit: f"free {unit}")
        self._note_before(Reducer, "_copy_in", lambda args, unit: f"copy in {args[0]._group.label}")
        self._note_before(Accumulator, "add", lambda args, unit: f"accumulate {args[1][0].fqn.rpartition('.')[0]}")
        for name, said in HOST.items():
            self._patch_host(name, said)

    def queue(self, entry: str) -> None:
        """Note ``entry`` on the stream that is current."""
        self._add(self._current[-1], entry)
        self._latest[self._current[-1]] = _short(entry)

    def text(self) -> str:
        head = _row(**{name: name for name in COLUMNS})
        return "\n".join([head, *self.rows])

    def clear(self) -> None:
        self.rows.clear()

    def _add(self, column: str, entry: str) -> None:
        host = self._host[-1] if self._host else ""
        shown, self._noted = "" if host == self._noted else host, host
        self.rows.append(_row(**{"host": shown, column: _short(entry)}))

    def _create(self, device: torch.device, *, priority: int = 0) -> str:
        self._made.append(STREAMS[len(self._made)])
        return self._made[-1]

    def _now(self, device: torch.device) -> str:
        return self._current[-1]

    @contextmanager
    def _used(self, stream: str) -> Any:
        self._current.append(stream)
        yield
        self._current.pop()

    def _use(self, stream: str | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else self._used(stream)

    def _record(self, stream: str | None) -> _Event | None:
        return None if stream is None else _Event(self._latest.get(stream, "nothing"))

    def _wait(self, stream: str | None, event: _Event | None) -> None:
        if stream is not None and event is not None:
            self._add(stream, f"wait: {event.marked}")

    def _join(self, stream: str | None, other: str | None) -> None:
        if stream is not None and other is not None:
            self._wait(stream, self._record(other))

    def _named(self, what: str, unit: str) -> AbstractContextManager[Any]:
        if what == "copy_out":
            self.queue(f"copy out {unit}")
        return nullcontext()

    def _note_before(self, owner: Any, name: str, said: Callable[[Any, str | None], str]) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.queue(said(args, kwargs.get("unit")))
            return function(*args, **kwargs)

        self._patch.setattr(owner, name, noted)

    def _patch_host(self, name: str, said: str) -> None:
        function = getattr(Unit, name)

        def called(unit: Any, *args: Any) -> Any:
            whose = "" if name == "_end_of_backward" else " " + (unit.group.label if unit.group is not None else "?")
            self._host.append(_short(f"{said}{whose}"))
            try:
                return function(unit, *args)
            finally:
                self._host.pop()

        self._patch.setattr(Unit, name, called)


def _short(text: str) -> str:
    return text.replace("layers.", "").replace("(root)", "root").replace("embedding", "root")


def _row(**cells: str) -> str:
    return "".join(cells.get(name, "").ljust(width) for name, width in COLUMNS.items()).rstrip()


class _Computed(torch.autograd.Function):
    """Notes the compute of a layer's backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, timeline: Timeline, name: str) -> torch.Tensor:
        ctx.noted = timeline, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        timeline, name = ctx.noted
        timeline.queue(f"backward {name}")
        return grad, None, None


class _Layer(nn.Linear):
    def __init__(self, timeline: Timeline, name: str) -> None:
        super().__init__(4, 4, bias=False)
        self.timeline, self.name = timeline, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.timeline.queue(f"forward {self.name}")
        computed: torch.Tensor = _Computed.apply(super().forward(x), self.timeline, self.name)
        return computed


class _Model(nn.Module):
    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.embedding = _Layer(timeline, "(root)")
        self.layers = nn.ModuleList(_Layer(timeline, f"layers.{index}") for index in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


@world(4)
def test_the_page_has_the_timeline_of_an_iteration(rank: Rank) -> None:
    if rank.device.type != "cpu":
        pytest.skip("accelerators have streams of their own")
    timeline = Timeline(rank.monkeypatch)
    model = _Model(timeline)
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        timeline.clear()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        timeline.queue("optimizer step")
        optimizer.zero_grad()
    assert timeline.text() in PAGE.read_text(), f"docs/reference.md should show this timeline:\n{timeline.text()}"
