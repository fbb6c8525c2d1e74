"""The dispatch mode that records each collective where it is issued.

It records c10d operators, functional collectives, their in-place and coalesced forms, and the collectives of DDP's own
reducer, and maps them all to one vocabulary, which does not depend on the names of Python functions in a torch version.
It does not see barriers. It must not be active where ``torch.compile`` should compile: under a dispatch mode torch
compiles nothing, silently.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardproof.harness.collectives.announce import Announcer, full_kind
from shardproof.harness.collectives.trace import Collective, Trace
from shardproof.harness.tensors import private
from shardproof.harness.tensors.private import TorchDispatchMode
from shardproof.harness.tensors.trees import tensors_of

#: The operators of each kind of collective, without their namespaces: c10d's, then the functional collectives.
_OPERATORS = {
    "all_gather": (
        "_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor",
        "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced",
    ),
    "all_reduce": (
        "allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced",
        "all_reduce_coalesced_",
    ),
    "broadcast": ("broadcast_", "broadcast"),
    "reduce": ("reduce_",),
    "gather": ("gather_", "gather_into_tensor_"),
    "scatter": ("scatter_",),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"),
    "send": ("send", "isend", "batch_p2p_ops"),  # the last are sends and receives, issued together
    "recv": ("recv_", "recv_any_source_", "irecv"),
    "barrier": ("barrier", "monitored_barrier_"),
}  # fmt: skip
_KINDS = {name: kind for kind, names in _OPERATORS.items() for name in names}
#: Operators in the same namespaces that are no collectives.
_NO_COLLECTIVES = frozenset(
    {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"}
)

#: The kinds of collectives that a Recorder sees. A barrier has no tensors, so it reaches no dispatch mode.
KINDS = tuple(kind for kind in _OPERATORS if kind != "barrier")

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class UnknownCollective(RuntimeError):
    """An operator of torch's collectives that no list here has. Its text explains itself."""


def kind_of(operator: str) -> str | None:
    """Return the kind of collective that an operator issues, by its full name; None if it is no collective.

    Raises:
        UnknownCollective: the operator is in a namespace of collectives, and nobody has said what it is.
    """
    namespace, _, name = operator.partition("::")
    if namespace not in _NAMESPACES:
        return None
    kind = _KINDS.get(name)
    if kind is None and name not in _NO_COLLECTIVES:
        # Uncounted, it would let an implementation send what it must not.
        raise UnknownCollective(f"{operator} is not known to shardproof; it may be a collective")
    return kind


class Recorder(TorchDispatchMode):
    """Records collectives into ``trace`` while active.

    Delays are injected by the hooks ``before`` and ``after``, at the operator, because the Python names of collectives
    changed in torch 2.13 and DDP's reducer uses none. An announcer announces every collective before the rank enters
    it.

    Args:
        unit_of: maps a collective's kind, dtype and bytes to the label of its unit.

    Attributes:
        trace: the collectives recorded so far.
        phase: the current phase of the step.
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
        # torch compiles nothing while a Recorder is active, and the wrapper that keeps Dynamo out of
        # ``__torch_dispatch__`` costs more than the recording.
        return False

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the collectives that are issued in this context, and assign them to ``phase``."""
        self.phase = phase
        announced = contextlib.nullcontext() if self._announcer is None else self._announcer.left_to_a_recorder()
        with announced, self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Let DTensor dispatch first: its own dispatch issues the collectives of a norm, and those reach this method as
        # operators on plain tensors.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kind = kind_of(func._schema.name)
        if kind is None:
            return func(*args, **(kwargs or {}))
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        named |= kwargs or {}
        group = _process_group(named)
        collective = self._describe(kind, named, tuple(dist.get_process_group_ranks(group)))
        self.trace.append(collective)
        if self._announcer is not None:
            self._announcer.announce(group, collective.kind, self._announcement(collective, named))
        self.before(collective)
        result = func(*args, **(kwargs or {}))
        self.after(collective)
        return result

    def _announcement(self, collective: Collective, named: dict[str, Any]) -> str:
        """Describe a collective with the operator and the root, in which ranks may differ; the trace has neither."""
        assert self._announcer is not None
        operator = named.get("reduce_op")
        operator = operator if isinstance(operator, str) else self._announcer.operator
        root = named.get("root_rank", named.get("src"))
        name = full_kind(collective.kind, operator=operator, root=None if root is None else collective.group[root])
        nbytes = f"{collective.nbytes} B"
        return " ".join(filter(None, [collective.phase, name, collective.dtype, nbytes, collective.unit]))

    def _describe(self, kind: str, named: dict[str, Any], group: tuple[int, ...]) -> Collective:
        first = next(tensors_of(list(named.values())))
        dtype = str(first.dtype).removeprefix("torch.")
        nbytes = _nbytes(kind, named, len(group))
        return Collective(self.phase, kind, dtype, nbytes, group, self._unit_of(kind, dtype, nbytes))


def _nothing(collective: Collective) -> None:
    """Default of the hooks ``before`` and ``after``."""


def _nbytes(kind: str, named: dict[str, Any], size: int) -> int:
    """Return the bytes of the collective's unsharded side.

    c10d operators take that tensor as an argument; for functional collectives its size is computed.
    """
    inputs = {name: value for name, value in named.items() if name.startswith("input")}
    outputs = {name: value for name, value in named.items() if name.startswith("output")}
    if kind in ("all_gather", "gather"):
        return _bytes_of(outputs) or _bytes_of(inputs) * size
    if kind == "scatter":
        return _bytes_of(inputs) or _bytes_of(outputs) * size
    return _bytes_of(inputs) or _bytes_of(named)


def _bytes_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))


def _process_group(named: dict[str, Any]) -> dist.ProcessGroup:
    group: Any = named.get("group_name")
    if "process_group" in named:
        group = dist.ProcessGroup.unbox(named["process_group"])
    elif isinstance(group, str):
        group = private.need("torch._C._distributed_c10d._resolve_process_group")(group)
    assert isinstance(group, dist.ProcessGroup)
    return group
