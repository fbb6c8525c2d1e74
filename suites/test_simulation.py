"""Chapter SIMULATION: one rank of a large world, of a size that no case can start.

Each case makes its process, in turn, a few single ranks of a world of as many as ``--simulate`` says. Nothing is
computed, so that sizes are exact and nothing is compared with a tolerance.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from shardproof.suites.places import MeshCoordinate, chunk, is_by_rows, share_numel, share_of
from shardproof.testing import Capability, Rank, contract, deadline, models, needs, simulated
from shardproof.testing.make import Precision, Simulation
from shardproof.testing.measure import Collective, Kind, Trace
from shardproof.testing.train import optim, parallel, shapes

pytestmark = [deadline(900.0), simulated()]

UNITS = [[f"layers.{index}"] for index in range(4)]
REDUCED = ("reduce_scatter", "all_reduce")
RESHARDS = pytest.mark.parametrize(
    "reshard_after_forward",
    [
        None,
        pytest.param(True, marks=needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)),
        pytest.param(False, marks=needs(Capability.RESHARD_AFTER_FORWARD)),
    ],
)
MIXED = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def chosen(rank: Rank) -> list[int]:
    """The ranks that are simulated: the first two, one in the middle and the last."""
    size = rank.simulates
    return sorted({0, min(1, size - 1), size // 2, size - 1})


@contextlib.contextmanager
def simulate(
    rank: Rank, index: int, build: Any = None, *, mesh: tuple[Any, ...] = (), **options: Any
) -> Iterator[Simulation]:
    """One rank of a large world, by default of a model of rows with SGD, on a mesh of these sizes and names."""
    with rank.simulated(index) as world:
        options = {"mesh": world.mesh(*mesh), "units": UNITS, "optimizer": optim.sgd()} | options
        one = rank.simulation(world, build or functools.partial(shapes.Rows, rank.simulates), **options)
        yield one
        one.close()


def steps(one: Simulation, width: int = shapes.WIDTH) -> Trace:
    """Train two steps and return the collectives of the second, which is like all later ones."""
    for _ in range(2):
        trace = one.step(lambda: (torch.zeros(2, width),), loss=models.mean_square)
    return trace


def of(trace: Trace, phase: str, *kinds: str) -> list[Collective]:
    """The collectives of a phase, of some kinds."""
    return [item for item in trace if item.phase == phase and item.kind in kinds]


def whole(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter without tensor parallelism."""
    return shape


def shares(
    one: Simulation, rank: Rank, parts: int, left: Callable[[str, tuple[int, ...]], tuple[int, ...]] = whole
) -> dict[str, int]:
    """By unit, the elements that a rank holds of it, with padding, where so many parts share a unit.

    ``left`` returns the shape of a parameter's tensor-parallel part, from its name and its full shape.
    """
    traits = rank.implementation.traits
    return {
        unit.label: share_numel([left(name, one.parameters[name]) for name in unit.names], parts, traits)
        for unit in one.units
    }


def check_bytes(items: Sequence[Collective], expected: Sequence[int], what: str) -> None:
    """Compare the bytes of collectives, in their order."""
    found = [item.nbytes for item in items]
    assert found == list(expected), f"{what}: the bytes of the collectives are {found}; they should be {list(expected)}"


@contract("SIMULATION-1", "SIMULATION-2")
@needs(Capability.COUNTED_UNITS)
@RESHARDS
@pytest.mark.parametrize("precision", [Precision(), pytest.param(MIXED, marks=needs(*MIXED.needs()))])
def test_gathers_and_reductions(rank: Rank, precision: Precision, reshard_after_forward: bool | None) -> None:
    """A step gathers each unit in order, again in backward if it was freed, and reduces it once, with exact bytes."""
    size = rank.simulates
    for index in chosen(rank):
        with simulate(rank, index, precision=precision, reshard_after_forward=reshard_after_forward) as one:
            trace = steps(one)
            share = shares(one, rank, size)
        compute = precision.param_dtype or torch.float32
        reduce = precision.reduced_in(torch.float32, rank.implementation.traits)
        gathered = {name: size * numel * compute.itemsize for name, numel in share.items()}
        reduced = {name: size * numel * reduce.itemsize for name, numel in share.items()}
        *layers, root = gathered
        check_bytes(of(trace, "forward", "all_gather"), [gathered[name] for name in (root, *layers)], "forward gathers")
        again = {None: layers[::-1], False: []}.get(reshard_after_forward, [root, *layers[::-1]])
        check_bytes(of(trace, "backward", "all_gather"), [gathered[name] for name in again], "backward gathers")
        check_reduced(of(trace, "backward", *REDUCED), [reduced[name] for name in layers[::-1]], reduced[root])
        for item in trace:
            dtype = compute if item.kind == "all_gather" else reduce
            assert item.dtype == str(dtype).removeprefix("torch."), f"rank {index}: dtype of [{item}]"
            assert item.group == tuple(range(size)), f"rank {index}: [{item.kind}] is among {len(item.group)} ranks"
        assert {item.phase for item in trace} <= {"forward", "backward"}


def check_reduced(items: Sequence[Collective], layers: Sequence[int], root: int) -> None:
    """Layers are reduced in the order of backward; the root's own unit is reduced once, at any position."""
    found = [item.nbytes for item in items]
    assert root in found, f"no reduction of the root's own unit, {root} bytes: {found}"
    found.remove(root)
    assert found == list(layers), f"the bytes of the reductions are {found}; they should be {list(layers)}"
    kinds = {item.kind for item in items}
    assert kinds == {"reduce_scatter"}, f"gradients are reduced by {', '.join(sorted(kinds))}"


@contract("SIMULATION-2")
def test_bytes_of_a_step(rank: Rank) -> None:
    """A step moves each parameter at most twice and each gradient once, whatever is sharded."""
    for index in chosen(rank):
        with simulate(rank, index) as one:
            trace = steps(one)
            full, padded = 4 * sum(unit.numel for unit in one.units), 4 * sum(unit.padded_numel for unit in one.units)
        gathers = 2 if "parameters" in rank.implementation.traits.shards else 1
        moved = sum(item.nbytes * (2 if item.kind == "all_reduce" else 1) for item in trace)
        assert full <= moved <= (gathers + 1) * padded, (
            f"rank {index} moves {moved} bytes in a step; with {full} bytes of parameters, {padded} with padding, "
            f"{(gathers + 1) * padded} suffice:\n{trace.render()}"
        )


@contract("SIMULATION-3")
@simulated(multiple_of=8)
@needs(Capability.COUNTED_UNITS, Capability.HYBRID)
@RESHARDS
def test_replicas(rank: Rank, reshard_after_forward: bool | None) -> None:
    """Replicas of eight shards gather and scatter among themselves, and all-reduce the shares across."""
    shape = (rank.simulates // 8, 8)
    for index in chosen(rank):
        coordinate = MeshCoordinate(shape, ("replicate", "shard"), index)
        with simulate(rank, index, mesh=(shape, coordinate.names), reshard_after_forward=reshard_after_forward) as one:
            trace = steps(one)
            share = shares(one, rank, 8)
        check_hybrid(trace, coordinate, share, again={None: 4, False: 0}.get(reshard_after_forward, 5))


def check_hybrid(trace: Trace, coordinate: MeshCoordinate, share: dict[str, int], *, again: int) -> None:
    """Check the number, the bytes and the ranks of the gradient collectives of a mesh of replicas and shards."""
    shards = coordinate.along("shard")
    replicas = coordinate.along("replicate") if "replicate" in coordinate.names else (coordinate.rank,)
    whole = sorted(4 * len(shards) * numel for numel in share.values())
    expected = {
        ("forward", "all_gather"): (len(share), shards),
        ("backward", "all_gather"): (again, shards),
        ("backward", "reduce_scatter"): (len(share), shards),
        ("backward", "all_reduce"): (len(share) if len(replicas) > 1 else 0, replicas),
    }
    # With one replica, the all-reduce among one rank may be omitted.
    trace = Trace(item for item in trace if len(item.group) > 1)
    for (phase, kind), (count, ranks) in expected.items():
        items = of(trace, phase, kind)
        assert len(items) == count, f"rank {coordinate.rank}: {len(items)} {kind} in {phase} instead of {count}"
        check_ranks(items, ranks, coordinate)
        parts = 1 if kind != "all_reduce" else len(shards)
        if count == len(share):
            found = sorted(item.nbytes * parts for item in items)
            assert found == whole, f"rank {coordinate.rank}: {kind} in {phase} of {found} bytes instead of {whole}"
    assert len(trace) == sum(count for count, _ in expected.values()), f"there are others:\n{trace.render()}"


def check_ranks(items: Sequence[Collective], ranks: tuple[int, ...], coordinate: MeshCoordinate) -> None:
    """Compare the ranks of collectives with those of a group, and name the dimensions that they run along."""
    for item in items:
        along = coordinate.dimensions_of(item.group) or f"ranks {item.group[:4]}..."
        expected = coordinate.dimensions_of(ranks)
        assert item.group == ranks, (
            f"rank {coordinate.rank}: {item.kind} in {item.phase} is along {along}, not {expected}"
        )


@contract("SIMULATION-3")
@simulated(multiple_of=8)
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_TO_SIZE, Capability.ROOT_RESHARD)
def test_resharded_to_eight(rank: Rank) -> None:
    """Resharded to groups of eight, forward gathers from all ranks and backward from eight neighbours."""
    size = rank.simulates
    for index in chosen(rank):
        with simulate(rank, index, reshard_after_forward=8) as one:
            trace = steps(one)
            share = shares(one, rank, size)
        coordinate = MeshCoordinate((size // 8, 8), ("groups", "neighbours"), index)
        *layers, root = share
        forward, backward = of(trace, "forward", "all_gather"), of(trace, "backward", "all_gather")
        check_bytes(forward, [4 * size * share[name] for name in (root, *layers)], "forward gathers")
        assert {item.group for item in forward} == {tuple(range(size))}
        assert len(backward) == len(share)
        check_ranks(backward, coordinate.along("neighbours"), coordinate)
        check_reduced(
            of(trace, "backward", *REDUCED), [4 * size * share[name] for name in layers[::-1]], 4 * size * share[root]
        )


@contract("SIMULATION-3")
@simulated(multiple_of=64)
@needs(Capability.COUNTED_UNITS, Capability.TENSOR_PARALLEL)
@pytest.mark.parametrize("replicas", [False, pytest.param(True, marks=needs(Capability.HYBRID))], ids=["2d", "3d"])
def test_tensor_parallel(rank: Rank, replicas: bool) -> None:
    """With tensor parallelism over eight ranks, data are exchanged along the data-parallel dimensions alone."""
    size = rank.simulates
    shape = (size // 64, 8, 8) if replicas else (size // 8, 8)
    names = ("replicate", "shard", "tensor") if replicas else ("shard", "tensor")
    for index in chosen(rank):
        coordinate = MeshCoordinate(shape, names, index)
        with rank.simulated(index) as world:
            mesh = world.mesh(shape, names)
            data_mesh = mesh[names[:-1]] if replicas else mesh["shard"]
            one = rank.simulation(
                world, functools.partial(parallel.MLPStack, TENSOR_WIDTH), mesh=data_mesh,
                units=UNITS[:3], optimizer=optim.sgd(),
                prepare=functools.partial(parallel.parallelize_mlps, mesh=mesh["tensor"]),
            )  # fmt: skip
            trace = steps(one, TENSOR_WIDTH)
            share = shares(one, rank, coordinate.sizes[-2], functools.partial(left_by_tensor_parallelism, index % 8))
            one.close()
        tensor = coordinate.along("tensor")
        data = Trace(item for item in trace if item.group != tensor)
        # Each layer all-reduces its output in forward and the gradient of its input in backward.
        across = [item.phase for item in trace if item.group == tensor]
        assert across == ["forward"] * 3 + ["backward"] * (len(across) - 3), f"along tensor: {across}"
        check_hybrid(data, coordinate, share, again=3)


#: Eight ranks divide it and its multiples, and the tensor-parallel part of a bias is a multiple of four elements.
TENSOR_WIDTH = 32


def left_by_tensor_parallelism(index: int, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One of eight ranks' part of a parameter: rows of the first projection, columns of the second."""
    if ".in_proj." in name:
        return share_of(shape, 8, index)
    if name.endswith(".out_proj.weight"):
        return (shape[0], chunk(shape[1], 8, index))
    return shape


@contract("SIMULATION-4")
@needs(Capability.SHARDED, Capability.ADAM)
def test_layouts(rank: Rank) -> None:
    """Each rank holds its part of every parameter and of the optimizer's state, also if some rank's part is empty."""
    size, by_rows = rank.simulates, is_by_rows(rank.implementation.traits)
    for index in chosen(rank):
        with simulate(rank, index, optimizer=optim.adam()) as one:
            steps(one)
            found, state = one.layout(), one.optimizer_layout()
            documented = {name: tuple(cut.shape) for name, cut in documented_parts(one).items()}
        assert found.keys() == one.parameters.keys()
        for name, layout in found.items():
            part = documented[name]
            assert layout.shape == part, f"rank {index} holds {layout.shape} of {name!r}, not {part}"
            assert layout.dtype == "float32"
            rows = share_of(one.parameters[name], size, index)
            assert not by_rows or layout.shape == rows, f"rank {index} holds {layout.shape} of {name!r}, not {rows}"
            held = {key: part.shape for key, part in state[name].items() if part.shape}
            if math.prod(layout.shape):
                assert held == dict.fromkeys(("exp_avg", "exp_avg_sq"), layout.shape), f"state of {name!r}: {held}"
            else:
                assert not sum(map(math.prod, held.values())), f"state of {name!r}, of which nothing is held: {held}"


def documented_parts(one: Simulation) -> dict[str, torch.Tensor]:
    """By parameter, the part that the adapter declares for this rank, cut from a tensor of the full shape."""
    pieces = one.adapter.parameters()
    return {name: pieces[name].cut(torch.empty(shape, device="meta")) for name, shape in one.parameters.items()}


@contract("SIMULATION-4")
@needs(Capability.SHARDED, Capability.ADAM)
def test_held_between_steps(rank: Rank) -> None:
    """Between two steps a rank holds its shares, twice as much of Adam's state, and no buffer of any unit."""
    size = rank.simulates
    for index in chosen(rank):
        with simulate(rank, index, optimizer=optim.adam()) as one:
            steps(one)
            held, share = one.held(), 4 * sum(shares(one, rank, size).values())
            scalars = sum(4 for state in one.optimizer_layout().values() for part in state.values() if not part.shape)
            local = 4 * sum(math.prod(layout.shape) for layout in one.layout().values())
        # An implementation may retain gradients that user code has dropped until the next forward.
        kept = {Kind.GRADIENTS: share} if held.of(Kind.GRADIENTS) else {}
        expected = {Kind.SHARDS: share, Kind.OPTIMIZER: 2 * local + scalars} | kept
        expected = {kind: nbytes for kind, nbytes in expected.items() if nbytes}
        assert held.by_kind == expected, f"rank {index} holds {shown(held.by_kind)}; it should hold {shown(expected)}"


def shown(by_kind: Mapping[Kind, int]) -> str:
    """Bytes by kind, formatted for a message."""
    return ", ".join(f"{nbytes} bytes of {kind}" for kind, nbytes in by_kind.items())


#: The kinds of memory that full units take for a while.
WHOLE = (Kind.GATHERED, Kind.WHOLE_GRADIENTS, Kind.REDUCTION)
#: How many full units a phase may hold, as in the chapter MEMORY. In forward: the one that computes, and the next
#: one in the memory of the gather and in that of its parameters. In backward: the one that computes, the gather of the
#: next one, the input of the reduction in flight, and gradients, twice where those of a unit are assembled.
AT_A_TIME = {"forward": 3, "backward": 5}


@contract("SIMULATION-5")
@needs(Capability.SHARDED)
def test_units_held_at_a_time(rank: Rank) -> None:
    """A step holds few full units, however many ranks and units there are: with more of them, not one byte more."""
    check_units_held(rank, (rank.simulates,), ("dp",), Precision())


@contract("SIMULATION-5")
@simulated(multiple_of=16)
@needs(Capability.SHARDED, Capability.HYBRID)
@pytest.mark.parametrize(
    "precision",
    [
        Precision(),
        pytest.param(LOW, marks=needs(*LOW.needs())),
    ],
    ids=["float32", "bfloat16"],
)
def test_units_held_with_replicas(rank: Rank, precision: Precision) -> None:
    """Shares that replicas all-reduce are freed before backward ends, also if reduced in a dtype of their own."""
    check_units_held(rank, (rank.simulates // 8, 8), ("replicate", "shard"), precision)


def check_units_held(rank: Rank, shape: tuple[int, ...], names: tuple[str, ...], precision: Precision) -> None:
    """Compare the full units that a step of eight units holds at most with those of four, and with the bound."""
    size = rank.simulates
    layer = (precision.param_dtype or torch.float32).itemsize * size * size
    # Reductions in another dtype than the gradients' need copies: a share is being all-reduced while the next one
    # is scattered.
    in_flight = {"forward": 0, "backward": 2 * layer // shape[-1] if len(shape) > 1 else 0}
    for index in chosen(rank):
        peaks = {}
        for depth in (4, 8):
            units = [[f"layers.{number}"] for number in range(depth)]
            layers = functools.partial(shapes.EqualLayers, size, depth)
            with simulate(rank, index, layers, mesh=(shape, names), units=units, precision=precision) as one:
                for _ in range(2):
                    one.step(lambda: (torch.zeros(1, size),), loss=models.mean_square)
                peaks[depth] = {phase: one.ledger.peak(step=1, phase=phase, kinds=WHOLE) for phase in AT_A_TIME}
        for phase, most in AT_A_TIME.items():
            fewer, more = peaks[4][phase], peaks[8][phase]
            assert more.by_kind == fewer.by_kind, (
                f"rank {index}: {phase} of 8 units holds {shown(more.by_kind)}, of 4 units {shown(fewer.by_kind)}"
            )
            allowed = most * layer + in_flight[phase]
            assert more.total <= allowed, (
                f"rank {index}: {phase} holds {more.total / layer:.2f} full units, {shown(more.by_kind)}; "
                f"{allowed / layer:.2f} are allowed"
            )
