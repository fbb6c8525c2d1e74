"""Simulates a training step of one rank on each mesh, and puts its memory, traffic and closed formulas together."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.collectives.trace import Trace
from shardproof.harness.judging.texts import rank_count
from shardproof.harness.planning import anatomy
from shardproof.harness.planning.anatomy import Anatomy
from shardproof.harness.planning.request import STATES, Mesh, PlanRequest, check, hosts_of, names_of
from shardproof.harness.planning.subject import ModelError, Subject, subject_of, why
from shardproof.harness.simulation.memory import Kind, extremes
from shardproof.harness.simulation.tensors import Tensors
from shardproof.harness.simulation.training import Simulation, why_not
from shardproof.harness.simulation.world import simulated_world
from shardproof.planfile import Dimension, Formula, Phase, Plan, Traffic, World


def plan(request: PlanRequest, wanted: Sequence[Mesh], *, node_size: int) -> Plan:
    """Simulate a step on each of several meshes of one kind, on hosts of ``node_size`` successive ranks.

    Raises:
        ValueError: the request is not valid, the model cannot be built without data, or the implementation cannot be
            simulated. The message is one line.
    """
    subject = subject_of(request.model, layers=request.layers, dim=request.dim)
    adapter = _adapter(request, dimensions=len(wanted[0]))
    hosts = [hosts_of(mesh, node_size) for mesh in wanted]
    for mesh in wanted:
        if request.rank >= math.prod(mesh):
            raise ValueError(
                f"--rank {request.rank}: a world of {rank_count(math.prod(mesh))} has 0 to {math.prod(mesh) - 1}"
            )
    known = examined(request, subject)
    worlds = []
    for mesh, count in zip(wanted, hosts, strict=True):
        found = simulate(request, subject, known, adapter, mesh)
        rows = traffic_of(found.trace, dict(zip(names_of(mesh), found.groups, strict=True)), node_size)
        formulas = _compared(request, known, adapter, mesh, found, rows)
        dimensions = tuple(map(Dimension, names_of(mesh), mesh))
        worlds.append(World(dimensions, count, found.phases, tuple(rows), tuple(formulas)))
    classes = collections.Counter(known.classes.values())
    own = {"root": 1} if known.shapes[""] else {}
    return Plan(
        model=request.model, about=subject.about, numel=known.numel, units={**classes, **own},
        implementation=request.implementation, version=adapter.version(), settings=_settings(request, subject, adapter),
        rank=request.rank, node_size=node_size, worlds=tuple(worlds),
        kinds={str(kind): text for kind, text in _KINDS.items()}, assumptions=_ASSUMPTIONS, torch=torch.__version__,
    )  # fmt: skip


def _adapter(request: PlanRequest, *, dimensions: int) -> type[Adapter]:
    adapter = registry.load(request.implementation)
    reason = adapter.availability("cpu")
    if reason is not None:
        raise ValueError(f"implementation {request.implementation!r} cannot be simulated on this host: {reason}")
    check(request, adapter, dimensions=dimensions)
    # It is refused only if it fails with a small model too.
    reason = why_not(adapter)
    if reason is not None:
        raise ValueError(f"implementation {request.implementation!r} cannot be simulated: {reason}")
    return adapter


def _settings(request: PlanRequest, subject: Subject, adapter: type[Adapter]) -> dict[str, str]:
    def name(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    asked = request.reshard_after_forward
    reshards = "by default" if asked is None else f"to groups of {asked}"
    if isinstance(asked, bool):
        reshards = "yes" if asked else "no"
    return {
        "batch": f"{request.batch} x {request.sequence or subject.length} tokens",
        "parameters": name(request.dtype),
        "gathered as": name(request.compute or request.dtype),
        "reduced as": name(request.precision.reduced_in(request.dtype, adapter.traits)),
        "optimizer": request.optimizer,
        "resharded after forward": reshards,
        "activations": "recomputed in backward" if request.checkpointing else "kept",
    }


_ASSUMPTIONS = (
    "memory is counted from the call that allocates a tensor to the call that frees it, in bytes that are asked for; "
    "what allocators round up and keep, workspaces of libraries (NCCL, cuBLAS), temporary memory within one operator "
    "and the device's context come on top",
    "the second step, which is like all later ones; operators are the CPU's: a device may save other tensors for "
    "backward, in attention above all",
    "ring algorithm: of N bytes gathered or reduced among n ranks a rank sends (n - 1) / n x N, in an all-reduce twice "
    "that; the ring follows the ranks, and what leaves a host is sent over the links between ranks of different hosts",
    "closed formulas: P parameters, P0 of them in the root's own unit, U units, S shards, R replicas; every parameter "
    "is cut into S equal parts without padding, every unit takes part once in a forward and a backward, and the root's "
    "own stays gathered from forward to backward",
)

# One rank's step: what it holds in each phase, and the collectives that it issues.

#: The kinds of memory, in the order of the tables.
_KINDS = {
    Kind.SHARDS: "what the rank holds of the parameters",
    Kind.GRADIENTS: "what it holds of the gradients that the optimizer reads",
    Kind.OPTIMIZER: "the optimizer's state",
    Kind.GATHERED: "whole parameters of units, and the buffers of their gathers",
    Kind.WHOLE_GRADIENTS: "gradients of whole parameters before they are reduced",
    Kind.REDUCTION: "what reductions read and write",
    Kind.ACTIVATIONS: "what forward saves for backward, temporary tensors, inputs and buffers of modules",
}

#: The phases that are shown, by those of a simulation that they consist of. The optimizer's is the last.
_PHASES = {"forward": ("inputs", "forward"), "backward": ("backward", "around"), "step": ("clip", "step", "zero")}


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What one rank does on one mesh in a step."""

    phases: tuple[Phase, ...]
    trace: Trace
    groups: list[tuple[int, ...]]  # the global ranks of its group along each dimension of the mesh


def examined(request: PlanRequest, subject: Subject) -> Anatomy:
    """Build the model once, without memory, and find its units; a failure is a ValueError of one line."""
    with Tensors().without_memory():
        return anatomy.examine(anatomy.build(request, subject).model, request.units)


def simulate(
    request: PlanRequest,
    subject: Subject,
    known: Anatomy,
    adapter: type[Adapter],
    mesh: Mesh,
    *,
    as_on_a_device: bool = True,
) -> Simulated:
    """Train two steps on one rank of a simulated world, whose ranks all are on the mesh.

    Buffers live as long as on a device with streams, or as on a CPU. What cannot be simulated is a ValueError of one
    line.
    """
    script = _Script(request, subject, known)
    with _in_one_line(request), simulated_world(math.prod(mesh), rank=request.rank) as world:
        device_mesh = world.mesh(mesh, names_of(mesh))
        one = Simulation(
            world, adapter, script.build, config=anatomy.config_of(request, known, device_mesh),
            optimizer=request.make_optimizer, as_on_a_device=as_on_a_device,
        )  # fmt: skip
        one.step(script.inputs, loss=script.loss)
        between = one.held()
        trace = one.step(script.inputs, loss=script.loss)
        found = extremes(one.ledger, step=1, parts=list(_PHASES.values()))
        groups = [tuple(dist.get_process_group_ranks(group)) for group in device_mesh.get_all_groups()]
        one.close()
    phases = [Phase("between steps", _named(between.by_kind), _named(between.by_kind))]
    phases += [Phase(name, _named(most.at_peak), _named(most.most)) for name, most in zip(_PHASES, found, strict=True)]
    return Simulated(tuple(phases), trace, groups)


def _named(by_kind: Mapping[Kind, int]) -> dict[str, int]:
    return {str(kind): nbytes for kind, nbytes in by_kind.items() if nbytes}


class _Script:
    """What a training script does itself: it builds the model, makes inputs and computes the loss."""

    def __init__(self, request: PlanRequest, subject: Subject, known: Anatomy) -> None:
        self._request, self._subject, self._known = request, subject, known
        self._given: tuple[Any, ...] = ()

    def build(self) -> nn.Module:
        built = anatomy.build(self._request, self._subject, self._known)
        self._inputs, self._loss = built.inputs, built.loss
        return built.model

    def inputs(self) -> tuple[Any, ...]:
        self._given = self._inputs(self._request.batch, self._request.sequence or self._subject.length)
        return self._given

    def loss(self, output: Any) -> torch.Tensor:
        given, self._given = self._given, ()
        return self._loss(output, *given)


@contextlib.contextmanager
def _in_one_line(request: PlanRequest) -> Iterator[None]:
    """Turn what a model raises where it meets tensors without memory into a ValueError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        under = f"--model {request.model!r} cannot be simulated under {request.implementation}"
        raise ValueError(f"{under}: {why(error)}") from error


# What a rank sends in a collective, and which part of it leaves a host: by the ring algorithm.
#
# A ring of n ranks passes each n-th part of the data from rank to rank, in the order of the ranks, n - 1 times in a
# gather or a reduce-scatter, and twice as often in an all-reduce (P. Patarasuk, X. Yuan: "Bandwidth optimal all-reduce
# algorithms for clusters of workstations", 2009; the factors of the "bus bandwidth" of NCCL's tests are the same). NCCL
# may choose trees, several rings or a switch that reduces instead.

#: How often the data of a ring's collective pass each link, in units of (n - 1) / n.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}


def sent(kind: str, nbytes: int, size: int) -> float:
    """The bytes that a rank sends in one collective among ``size`` ranks.

    Args:
        nbytes: the bytes of the unsharded side: the output of a gather, the input of a reduction. Of kinds without a
            ring, such as a broadcast, all of them are passed on once.
    """
    if size == 1:
        return 0.0
    passes = _PASSES.get(kind)
    return float(nbytes) if passes is None else passes * nbytes * (size - 1) / size


def crossing(group: Sequence[int], node_size: int) -> float:
    """The part of a ring's links, in the order of the group, that lie between ranks of different hosts, from 0 to 1."""
    hosts = [rank // node_size for rank in group]
    links = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return sum(one != other for one, other in links) / len(hosts)


def traffic_of(trace: Trace, dimensions: Mapping[str, tuple[int, ...]], node_size: int) -> list[Traffic]:
    """Sum the collectives by group, kind and dtype, in the order of their first ones."""
    names = {group: name for name, group in dimensions.items()}
    found: dict[tuple[tuple[int, ...], str, str], list[int]] = {}
    for one in trace:
        found.setdefault((one.group, one.kind, one.dtype), []).append(one.nbytes)
    rows = []
    for (group, kind, dtype), sizes in found.items():
        moved = sum(sent(kind, nbytes, len(group)) for nbytes in sizes)
        ranks = f"ranks {group[0]} to {group[-1]}" if len(group) > 1 else f"rank {group[0]}"
        rows.append(
            Traffic(
                group=names.get(group) or ranks, ranks=len(group), kind=kind, dtype=dtype, count=len(sizes),
                nbytes=sum(sizes), sent=moved, across=moved * crossing(group, node_size),
            )
        )  # fmt: skip
    return rows


# Closed formulas of sharded data parallelism, to stand beside what a simulation counts.
#
# For parameters that are cut into equal parts: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
# Trillion Parameter Models" (2020), sections 5 and 7, with the units and the resharding of the contract.


def _compared(
    request: PlanRequest, known: Anatomy, adapter: type[Adapter], mesh: Mesh, found: Simulated, rows: Sequence[Traffic]
) -> Iterator[Formula]:
    """Set each formula beside the simulated number."""
    for kind, formula in _memory_formulas(request, known, adapter, shards=mesh[-1]):
        # When the optimizer steps, everything that it needs is there.
        yield dataclasses.replace(formula, simulated=found.phases[-1].most.get(kind, 0))
    for group, kind, number, nbytes in _traffic_formulas(request, known, adapter, mesh):
        of_kind = [one for one in rows if (one.group, one.kind) == (group, kind)]
        yield dataclasses.replace(number, simulated=sum(one.count for one in of_kind))
        yield dataclasses.replace(nbytes, simulated=sum(one.nbytes for one in of_kind))


def _memory_formulas(
    request: PlanRequest, known: Anatomy, adapter: type[Adapter], *, shards: int
) -> Iterator[tuple[str, Formula]]:
    """What a rank holds for as long as the model lives or the optimizer needs it, with its kind."""
    item, states = request.dtype.itemsize, STATES[request.optimizer]

    def formula(quantity: str, kind: str, factor: str, size: int) -> Formula:
        divided = kind in adapter.traits.shards
        text = f"{factor}P x {item} B{' / S' if divided else ''}"
        return Formula(quantity, "B", text, known.numel * size * item / (shards if divided else 1), 0)

    yield "shards", formula("shards", "parameters", "", 1)
    yield "gradients", formula("gradients", "gradients", "", 1)
    if states:
        yield "optimizer", formula("optimizer state", "optimizer", f"{states} x " if states > 1 else "", states)


def _traffic_formulas(
    request: PlanRequest, known: Anatomy, adapter: type[Adapter], mesh: Mesh
) -> Iterator[tuple[str, str, Formula, Formula]]:
    """A step's collectives by dimension of the mesh and kind: their number, and their bytes.

    There are none where a group of one rank may issue collectives or not, and for an implementation that does not shard
    parameters or has other units.
    """
    capabilities, shards = adapter.capabilities(), mesh[-1]
    if Capability.COUNTED_UNITS not in capabilities or Capability.SHARDED not in capabilities:
        return
    if shards == 1 or type(request.reshard_after_forward) is int:
        return
    units, root = known.numels(), known.root_numel
    compute = (request.compute or request.dtype).itemsize
    reduce = request.precision.reduced_in(request.dtype, adapter.traits).itemsize
    again = units if request.reshard_after_forward is not False else []
    # An explicit choice holds for the root's own unit too, where the implementation lets the root choose.
    keeps_root = request.reshard_after_forward is None or Capability.ROOT_RESHARD not in capabilities
    kept = 1 if again and root and keeps_root else 0
    gathers = len(units) + len(again) - kept
    gathered = sum(units) + sum(again) - (root if kept else 0)
    texts: dict[bool, tuple[str, str]] = {True: ("2 U - 1", "(2 P - P0)"), False: ("2 U", "2 P")}
    count, numel = texts[bool(kept)] if again else ("U", "P")

    def pair(what: str, number: tuple[str, int], nbytes: tuple[str, float]) -> tuple[Formula, Formula]:
        return Formula(what, "collectives", *number, 0), Formula(f"bytes of {what}", "B", *nbytes, 0)

    each, reduced = ("U", len(units)), known.numel * reduce
    yield "shard", "all_gather", *pair("gathers", (count, gathers), (f"{numel} x {compute} B", gathered * compute))
    yield "shard", "reduce_scatter", *pair("reductions", each, (f"P x {reduce} B", reduced))
    if len(mesh) > 1 and mesh[0] > 1:
        over = pair("all-reduces over replicas", each, (f"P x {reduce} B / S", reduced / shards))
        yield "replicate", "all_reduce", *over
