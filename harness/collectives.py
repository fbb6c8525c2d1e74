"""The ordered trace of one rank's collectives, recorded where each is issued.

A dispatch mode sees c10d operators, functional collectives, their in-place and coalesced forms
and DDP's own reducer, under one vocabulary whatever the torch version calls its Python functions.
It misses barriers, and it must not be active where ``torch.compile`` should compile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.trees import tensors_of

_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "send": "send",
    "isend": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "irecv": "recv",
    "barrier": "barrier",
}
"""Operator names without their namespace: c10d's first, then the functional collectives'."""

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it.

    ``nbytes`` is what the whole group gathers, reduces or moves: the output of an all-gather,
    the input of anything else. ``group`` lists global ranks. ``unit`` is the unit whose
    parameters have that many bytes, "a|b" where several have, "" where none has.
    """

    phase: str
    kind: str
    dtype: str
    nbytes: int
    group: tuple[int, ...]
    unit: str = ""

    def __str__(self) -> str:
        ranks = f"{self.group[0]}-{self.group[-1]}" if _is_range(self.group) else ",".join(map(str, self.group))
        unit = f"  {self.unit}" if self.unit else ""
        return f"{self.phase:<8}  {self.kind:<14}  {self.dtype:<8}  {self.nbytes:>6} B  ranks {ranks}{unit}"


class Trace(list[Collective]):
    """Collectives in the order in which a rank issued them."""

    def render(self) -> str:
        """One line a collective, with the phase, kind, dtype, bytes, group and unit."""
        return "".join(f"{collective}\n" for collective in self)

    def counts(self, phase: str) -> dict[str, int]:
        """How many of each kind the phase issued; kinds that it did not issue are absent."""
        return dict(collections.Counter(item.kind for item in self if item.phase == phase))


def first_difference(traces: Sequence[Trace]) -> str | None:
    """Where the members of a group issue different collectives on it, in one line, or None.

    Args:
        traces: one per rank, in the order of global ranks.
    """
    groups = sorted({item.group for trace in traces for item in trace})
    for group in groups:
        sequences = {rank: [item for item in traces[rank] if item.group == group] for rank in group}
        first = sequences[group[0]]
        for rank, sequence in sequences.items():
            for position in range(max(len(first), len(sequence))):
                ours, theirs = (_at(items, position) for items in (first, sequence))
                if ours != theirs:
                    return (
                        f"collective {position} on ranks {_squeeze(str(list(group)))} differs: "
                        f"rank {group[0]} issued [{ours}], rank {rank} issued [{theirs}]"
                    )
    return None


def _at(items: Sequence[Collective], position: int) -> str:
    return _squeeze(str(items[position])) if position < len(items) else "nothing more"


def count_difference(trace: Trace, phase: str, expected: dict[str, int]) -> tuple[str | None, str | None]:
    """Which unit, if one stands out, and how the phase's counts differ from the expected ones; (None, None) if not."""
    counts = trace.counts(phase)
    for kind in sorted(counts.keys() | expected.keys()):
        found, wanted = counts.get(kind, 0), expected.get(kind, 0)
        if found != wanted:
            items = [item for item in trace if item.phase == phase and item.kind == kind]
            per_unit = collections.Counter(item.unit or f"{item.nbytes} B" for item in items)
            listed = ", ".join(f"{unit} {count}" for unit, count in per_unit.items())
            unit, most = per_unit.most_common(1)[0] if per_unit else ("", 0)
            text = f"{found} {kind} instead of {wanted} in {phase}: {listed or 'none'}"
            return (unit if most > 1 else None), text
    return None, None


class Recorder(TorchDispatchMode):
    """Records into ``trace`` while active; ``phase`` names what the rank is doing.

    ``before`` and ``after`` are called around each collective: that is how delays are injected at
    the operator, below whichever Python name issued it and on the stream that issued it.
    """

    announce: ClassVar[Callable[[dist.ProcessGroup, str, str], None] | None] = None
    """Told about every collective before it is entered; set once per process."""

    active: ClassVar[int] = 0
    """How many Recorders are, on any thread: backward runs on threads of its own on a device."""

    def __init__(self, unit_of: Callable[[str, str, int], str] = lambda kind, dtype, nbytes: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase = ""
        self.before: Callable[[Collective], None] = _nothing
        self.after: Callable[[Collective], None] = _nothing
        self._unit_of = unit_of

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a Recorder is active, and the guard against it costs more than the recording.
        return False

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record what is issued inside, as of this phase."""
        self.phase = phase
        Recorder.active += 1
        try:
            with self:
                yield
        finally:
            Recorder.active -= 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # DTensor first: its own dispatch issues the collectives of a norm, and those come back here as plain ones.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in _NAMESPACES or name not in _KINDS:
            return func(*args, **(kwargs or {}))
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        named |= kwargs or {}
        group = _process_group(named)
        collective = self._describe(_KINDS[name], named, tuple(dist.get_process_group_ranks(group)))
        self.trace.append(collective)
        if Recorder.announce is not None:
            Recorder.announce(group, collective.kind, _squeeze(str(collective)))
        self.before(collective)
        result = func(*args, **(kwargs or {}))
        self.after(collective)
        return result

    def _describe(self, kind: str, named: dict[str, Any], group: tuple[int, ...]) -> Collective:
        first = next(tensors_of(list(named.values())))
        dtype = str(first.dtype).removeprefix("torch.")
        nbytes = _nbytes(kind, named, len(group))
        return Collective(self.phase, kind, dtype, nbytes, group, self._unit_of(kind, dtype, nbytes))


def _nothing(collective: Collective) -> None:
    """The default hook."""


def _nbytes(kind: str, named: dict[str, Any], size: int) -> int:
    """Bytes of the unsharded side: an argument of the c10d forms, computed for the functional ones."""
    inputs = {name: value for name, value in named.items() if name.startswith("input")}
    outputs = {name: value for name, value in named.items() if name.startswith("output")}
    if kind in ("all_gather", "gather"):
        return _bytes_of(outputs) or _bytes_of(inputs) * size
    return _bytes_of(inputs) or _bytes_of(named)


def _bytes_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))


def _process_group(named: dict[str, Any]) -> dist.ProcessGroup:
    group: Any = named.get("group_name")
    if "process_group" in named:
        group = dist.ProcessGroup.unbox(named["process_group"])
    elif isinstance(group, str):
        group = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _is_range(ranks: tuple[int, ...]) -> bool:
    return len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1))


def _squeeze(line: str) -> str:
    return " ".join(line.split())
