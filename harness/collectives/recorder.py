"""The dispatch mode that records each collective where it is issued.

It sees c10d operators, functional collectives, their in-place and coalesced forms, and DDP's own reducer, and maps all
of them to one vocabulary, whatever the torch version calls its Python functions. It does not see barriers, and it must
not be active where ``torch.compile`` should compile: under a dispatch mode torch compiles nothing, silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.collectives.trace import Collective, Trace, squeeze
from shardproof.harness.tensors.trees import tensors_of

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


class Recorder(TorchDispatchMode):
    """Records collectives into ``trace`` while active.

    Args:
        unit_of: from a collective's kind, dtype and bytes to the label of its unit.
        announcer: also told of every collective, before it is entered.

    Attributes:
        trace: the collectives so far.
        phase: the current phase of the step.
        before, after: called around each collective. Delays are injected here, at the operator, because Python names of
            collectives changed in torch 2.13 and DDP's reducer uses none.
    """

    def __init__(
        self,
        unit_of: Callable[[str, str, int], str] = lambda kind, dtype, nbytes: "",
        *,
        announcer: Announcer | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase = ""
        self.before: Callable[[Collective], None] = _nothing
        self.after: Callable[[Collective], None] = _nothing
        self._unit_of = unit_of
        self._announcer = announcer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a Recorder is active, and the guard against it costs more than the recording.
        return False

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record what is issued inside, as of this phase."""
        self.phase = phase
        announced = contextlib.nullcontext() if self._announcer is None else self._announcer.left_to_a_recorder()
        with announced, self:
            yield

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
        if self._announcer is not None:
            self._announcer.announce(group, collective.kind, squeeze(str(collective)))
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
