"""Puts a plan together: one simulation for each mesh, its traffic by group, and the closed formulas."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.collectives.trace import Trace
from shardproof.harness.planning import formulas, simulated
from shardproof.harness.planning.anatomy import Anatomy
from shardproof.harness.planning.request import Mesh, Request, check, hosts_of, names_of
from shardproof.harness.planning.subject import Subject, subject_of

# What a rank sends in a collective, and which part of it leaves a host: by the ring algorithm.
#
# A ring of n ranks passes each n-th part of the data from rank to rank, in the order of the ranks, n - 1 times in a
# gather or a reduce-scatter, and twice as often in an all-reduce (P. Patarasuk, X. Yuan: "Bandwidth optimal all-reduce
# algorithms for clusters of workstations", 2009; the factors of the "bus bandwidth" of NCCL's tests are the same). NCCL
# may choose trees, several rings or a switch that reduces instead.


#: How often the data of a ring's collective pass each link, in units of (n - 1) / n.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}

ASSUMPTION = (
    "ring algorithm: of N bytes gathered or reduced among n ranks a rank sends (n - 1) / n x N, in an all-reduce twice "
    "that; the ring follows the ranks, and what leaves a host is sent over the links between ranks of different hosts"
)


def sent(kind: str, nbytes: int, size: int) -> float:
    """The bytes that a rank sends in one collective.

    Args:
        kind: of the collective, as in a trace.
        nbytes: the bytes of the unsharded side: the output of a gather, the input of a reduction.
        size: the number of ranks in the group.

    Returns:
        The bytes. Of kinds without a ring, such as a broadcast, all of ``nbytes`` are passed on once.
    """
    if size == 1:
        return 0.0
    passes = _PASSES.get(kind)
    return float(nbytes) if passes is None else passes * nbytes * (size - 1) / size


def crossing(group: Sequence[int], node_size: int) -> float:
    """The part of a ring's links that lie between ranks of different hosts, from 0 to 1.

    Args:
        group: the global ranks, in the order of the ring.
        node_size: ranks of a host, which has successive ranks.
    """
    hosts = [rank // node_size for rank in group]
    links = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return sum(one != other for one, other in links) / len(hosts)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, dtype and group in a step; bytes are sums over them.

    Attributes:
        group: the dimension of the mesh, or the ranks.
        ranks: the number of ranks in the group.
        kind: as in a trace.
        dtype: the dtype without its "torch." prefix.
        count: how many there are.
        nbytes: the bytes of the unsharded side.
        sent: the bytes that the rank sends.
        across: those of them that leave a host, as the mean over the group.
    """

    group: str
    ranks: int
    kind: str
    dtype: str
    count: int
    nbytes: int
    sent: float
    across: float


@dataclasses.dataclass(frozen=True)
class Compared:
    """A closed formula and what was simulated; as :class:`formulas.Formula` otherwise."""

    quantity: str
    unit: str
    text: str
    value: float
    simulated: int


@dataclasses.dataclass(frozen=True)
class World:
    """What was found for one mesh.

    Attributes:
        mesh: the name and size of each dimension.
        hosts: how many hosts its ranks take.
        phases: memory in each phase, in order.
        traffic: the collectives of a step.
        formulas: closed formulas with the simulated numbers.
    """

    mesh: tuple[tuple[str, int], ...]
    hosts: int
    phases: tuple[simulated.Phase, ...]
    traffic: tuple[Traffic, ...]
    formulas: tuple[Compared, ...]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan.

    Attributes:
        about: what the model is; empty for the user's own.
        numel: elements of its parameters.
        units: the number of units by the class of their module; the root's own is "root".
        version: the implementation's.
        settings: what a step is, for readers.
        worlds: one for each mesh, in the given order.
        kinds: what the kinds of memory are.
        assumptions: under which the numbers hold.
        torch: the version of torch.
    """

    about: str
    numel: int
    units: dict[str, int]
    version: str
    settings: dict[str, str]
    worlds: tuple[World, ...]
    kinds: dict[str, str]
    assumptions: tuple[str, ...]
    torch: str


def plan(request: Request, wanted: Sequence[Mesh], *, node_size: int) -> Planned:
    """Simulate a step on each mesh.

    Args:
        request: what is trained.
        wanted: the meshes, of one kind; one at least.
        node_size: ranks of a host, which has successive ranks.

    Raises:
        ValueError: the request is not valid, the model cannot be built without data, or the implementation cannot be
            simulated. The message is one line.
    """
    subject = subject_of(request.model)
    adapter = _adapter(request, dimensions=len(wanted[0]))
    hosts = [hosts_of(mesh, node_size) for mesh in wanted]
    for mesh in wanted:
        if request.rank >= math.prod(mesh):
            raise ValueError(
                f"--rank {request.rank}: a world of {math.prod(mesh)} ranks has 0 to {math.prod(mesh) - 1}"
            )
    anatomy = simulated.examined(request, subject)
    worlds = tuple(
        _world(
            request,
            anatomy,
            adapter,
            mesh,
            simulated.simulate(request, subject, anatomy, adapter, mesh),
            hosts=count,
            node_size=node_size,
        )
        for mesh, count in zip(wanted, hosts, strict=True)
    )
    classes = collections.Counter(anatomy.classes.values())
    own = {"root": 1} if anatomy.shapes[""] else {}
    return Planned(
        about=subject.about,
        numel=anatomy.numel,
        units={**classes, **own},
        version=adapter.version(),
        settings=_settings(request, subject, adapter),
        worlds=worlds,
        kinds={str(kind): text for kind, text in simulated.KINDS.items()},
        assumptions=(*simulated.ASSUMPTIONS, ASSUMPTION, formulas.ASSUMPTION),
        torch=torch.__version__,
    )


def _adapter(request: Request, *, dimensions: int) -> type[Adapter]:
    adapter = registry.load(request.implementation)
    reason = adapter.availability("cpu")
    if reason is not None:
        raise ValueError(f"implementation {request.implementation!r} cannot be simulated on this host: {reason}")
    check(request, adapter, dimensions=dimensions)
    simulated.refuse(request, adapter)
    return adapter


def _settings(request: Request, subject: Subject, adapter: type[Adapter]) -> dict[str, str]:
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
        "reduced as": name(request.precision.reduce_dtype(request.dtype, adapter.traits)),
        "optimizer": request.optimizer,
        "resharded after forward": reshards,
        "activations": "recomputed in backward" if request.checkpointing else "kept",
    }


def _world(
    request: Request,
    anatomy: Anatomy,
    adapter: type[Adapter],
    mesh: Mesh,
    found: simulated.Simulated,
    *,
    hosts: int,
    node_size: int,
) -> World:
    names = names_of(mesh)
    rows = traffic_of(found.trace, dict(zip(names, found.groups, strict=True)), node_size)
    shards, replicas = mesh[-1], mesh[0] if len(mesh) > 1 else 1
    return World(
        mesh=tuple(zip(names, mesh, strict=True)),
        hosts=hosts,
        phases=found.phases,
        traffic=tuple(rows),
        formulas=tuple(_compared(request, anatomy, adapter, found, rows, shards=shards, replicas=replicas)),
    )


def traffic_of(trace: Trace, dimensions: Mapping[str, tuple[int, ...]], node_size: int) -> list[Traffic]:
    """Sum the collectives by group, kind and dtype, in the order of their first ones."""
    names = {group: name for name, group in dimensions.items()}
    found: dict[tuple[tuple[int, ...], str, str], list[int]] = {}
    for one in trace:
        found.setdefault((one.group, one.kind, one.dtype), []).append(one.nbytes)
    rows = []
    for (group, kind, dtype), sizes in found.items():
        moved = sum(sent(kind, nbytes, len(group)) for nbytes in sizes)
        rows.append(
            Traffic(
                group=names.get(group) or _ranks(group),
                ranks=len(group),
                kind=kind,
                dtype=dtype,
                count=len(sizes),
                nbytes=sum(sizes),
                sent=moved,
                across=moved * crossing(group, node_size),
            )
        )
    return rows


def _ranks(group: tuple[int, ...]) -> str:
    return f"ranks {group[0]} to {group[-1]}" if len(group) > 1 else f"rank {group[0]}"


def _compared(
    request: Request,
    anatomy: Anatomy,
    adapter: type[Adapter],
    found: simulated.Simulated,
    rows: Sequence[Traffic],
    *,
    shards: int,
    replicas: int,
) -> list[Compared]:
    """Set each formula beside the simulated number."""
    compared = []
    for kind, formula in formulas.memory(request, anatomy, adapter, shards).items():
        # When the optimizer steps, everything that it needs is there.
        compared.append(Compared(**dataclasses.asdict(formula), simulated=found.step.most.get(kind, 0)))
    closed = formulas.traffic(request, anatomy, adapter, shards=shards, replicas=replicas)
    for (group, kind), (number, nbytes) in closed.items():
        of_kind = [one for one in rows if (one.group, one.kind) == (group, kind)]
        compared.append(Compared(**dataclasses.asdict(number), simulated=sum(one.count for one in of_kind)))
        compared.append(Compared(**dataclasses.asdict(nbytes), simulated=sum(one.nbytes for one in of_kind)))
    return compared
