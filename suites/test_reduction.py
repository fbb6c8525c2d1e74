"""Chapter REDUCTION: how gradients are averaged."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardproof.suites.apis import Own
from shardproof.testing import Capability, Hardware, Rank, Run, contract, each_value, models, needs, world
from shardproof.testing.axes import RESHARD, SHARDS
from shardproof.testing.casts import check_equal, run_and_replica
from shardproof.testing.compare import check_bits, step_label
from shardproof.testing.make import (
    Accumulation,
    Clip,
    NamedDimensions,
    Precision,
    Settings,
    as_fsdp1,
    run_by_units,
    tower,
)
from shardproof.testing.measure import ROOT
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import mixed, optim, parallel, shapes

pytestmark = world(2)

SHAPE = (6, 4)
LOW = needs("precision.reduce_dtype")
NAMES = ("replicate", "shard")
#: Two replicas, which are of one rank each in a world of two; or shards alone.
REPLICAS = pytest.mark.parametrize(
    "replicas",
    [False, pytest.param(True, marks=needs(Capability.HYBRID, Capability.SINGLE_RANK))],
    ids=["shards", "replicas"],
)
IN_FLOAT32 = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FREED = needs(
    Capability.UNIT_SETTINGS, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD
)
OF_A_UNIT = pytest.mark.parametrize("unit", ["layers.1", ""], ids=["a-layer", "the-root"])


@contract("REDUCTION-1")
@world(2, 4)
@needs("gradient_divide_factors")
@pytest.mark.parametrize(
    ("factors", "dtype"),
    [
        *(
            pytest.param(factors, dtype, id=f"{name}-{dtype_name}", marks=[LOW] if dtype else [])
            for name, factors in (("of-all-units", {"low": 1.0, "high": 16.0, "": 8.0}), ("of-one-unit", {"high": 8.0}))
            # In bfloat16 a factor that is a power of two made all gradients zero over NCCL (pytorch#190745).
            for dtype_name, dtype in (("float32", None), ("bfloat16", torch.bfloat16), ("float16", torch.float16))
        ),
        pytest.param({"low": 0.5, "high": 0.25}, None, id="below-one-float32"),
        pytest.param({"low": 0.5, "high": 0.25}, torch.bfloat16, id="below-one-bfloat16", marks=LOW),
        # No powers of two: a half may be divided out before the sum, and the rest after it. In float32 some multiply by
        # the inverse, which rounds differently.
        pytest.param({"low": 3.0, "high": 6.0}, torch.float16, id="of-three-float16", marks=LOW),
    ],
)
@REPLICAS
def test_divide_factors(rank: Rank, replicas: bool, factors: dict[str, float], dtype: torch.dtype | None) -> None:
    """The sum over shards and replicas together is divided by the factor of the unit, or else by the ranks."""
    # Sums of two, because their order does not matter: two replicas, of two shards or of one, or pairs of ranks.
    pairs = rank.mesh((rank.world_size // 2, 2), NAMES)["shard"]
    mesh = rank.mesh((2, rank.world_size // 2), NAMES) if replicas else pairs
    model = mixed.Mixed()
    # All gradients are far from the smallest float16, so that a part of the division before the sum loses nothing.
    for value in (*model.parameters(), model.low.offset, model.high.offset):
        value.data.abs_().add_(1)
    options: dict[str, Any] = {
        "mesh": mesh,
        "gradient_divide_factors": factors,
        "precision": Precision(reduce_dtype=dtype),
    }
    run, replica = run_and_replica(rank, model, units=[["low"], ["high"]], optimizer=optim.sgd(lr=2.0**-10), **options)
    for step in range(2):
        batch = [(rank.batch(step, SHAPE).abs() + 1,)]
        expected = replica.step(batch, loss=torch.sum)
        check_equal(rank, run, run.step(batch, loss=torch.sum), expected, number=step)


@contract("REDUCTION-1")
@needs(Capability.UNIT_SETTINGS, "gradient_divide_factors", Capability.DEFERRED_REDUCTION)
@each_value("call")
@pytest.mark.parametrize(
    ("call", "replicas"),
    [
        pytest.param("gradient_divide_factor", True, marks=needs(Capability.HYBRID, Capability.SINGLE_RANK)),
        ("reduce_scatter_divide_factor", False),
    ],
    ids=["replicas-of-one-rank", "older-call"],
)
def test_divide_factor_of_another_step(rank: Rank, call: str, replicas: bool) -> None:
    """The second of two steps divides by the factor that user code has set since the first.

    The factors are half, a quarter of and twice the number of ranks: bit for bit, gradients are twice, four times and
    half of those without.
    """
    mesh = rank.mesh((2, 1), NAMES) if replicas else None
    runs = two_runs(rank, accumulation=Accumulation(), microbatches=2, mesh=mesh)
    (changed,) = [one for one in runs[1].units if one.label == "layers.1"]
    for step, factor in enumerate([0.5, 0.25, 2.0]):
        runs[1].adapter.change(Settings(**{call: factor * rank.world_size}), unit="layers.1")  # type: ignore[arg-type]
        compare_gradients(rank, runs, step, doubled=changed.names, times=1 / factor)


@contract("REDUCTION-8")
@needs(Capability.UNIT_SETTINGS, Capability.RESHARD_AFTER_FORWARD)
def test_replacing_a_custom_collective(rank: Rank) -> None:
    """Setting a custom function, all-gather or reduce-scatter again replaces the previous one."""
    pair = tower(rank, reshard_after_forward=True)
    owns = [(Own(), Own()) for _ in range(2)]
    calls: list[int] = []
    for step, (gather, reduce) in enumerate(owns):
        function = functools.partial(lambda step, share: calls.append(step), step)
        pair.adapter.change(
            Settings(custom_all_gather=gather, custom_reduce_scatter=reduce, all_reduce_hook=function), unit="layers.1"
        )
        pair.checked_step(rank.batch(step, (4, 9)))
        used = [(len(one.groups), len(other.groups)) for one, other in owns]
        expected = [(2, 1), (2, 1) if step else (0, 0)]
        assert used == expected, f"by {step_label(step)} the two custom gathers and reductions were used {used} times"
        assert calls == list(range(step + 1)), f"by {step_label(step)} functions {calls} were called"


@contract("REDUCTION-2")
@world(2, 4)
@needs(Capability.UNIT_SETTINGS, Capability.DEFERRED_REDUCTION)
@OF_A_UNIT
@REPLICAS
def test_function_after_the_reduction(rank: Rank, replicas: bool, unit: str) -> None:
    """A function that is set for one unit runs once in each reduction, on the gradients that the optimizer gets.

    Half of the ranks, one replica of two, double them: a sum over replicas after that would change both.
    """
    mesh = rank.mesh((2, rank.world_size // 2), NAMES) if replicas else rank.mesh()
    runs = two_runs(rank, accumulation=Accumulation(), microbatches=2, mesh=mesh)
    sizes: list[int] = []
    doubles = rank.index >= rank.world_size // 2

    def function(share: torch.Tensor) -> None:
        sizes.append(share.numel())
        share.mul_(2 if doubles else 1)

    runs[1].adapter.change(Settings(all_reduce_hook=function), unit=unit)
    (changed,) = [one for one in runs[1].units if one.label == (unit or ROOT)]
    for step in range(2):
        compare_gradients(rank, runs, step, doubled=changed.names if doubles else ())
        padded = changed.padded_numel // runs[1].adapter.config.shard_size
        assert sizes == [padded] * (step + 1), f"by {step_label(step)} the function has got shares of {sizes} elements"


@contract("REDUCTION-6")
@world(2, 4)
@needs(Capability.REDUCTION_HOOK, Capability.DEFERRED_REDUCTION)
@SHARDS
def test_function_in_place_of_the_reduction(rank: Rank, shards: bool) -> None:
    """A function that replaces all reductions is called once for each unit and reduction, and its output is used."""
    runs = two_runs(rank, accumulation=Accumulation(), microbatches=2, mesh=rank.mesh(), shards=shards)
    calls: list[tuple[int, int]] = []
    size = rank.world_size if shards else 1

    def function(gradient: torch.Tensor, share: torch.Tensor | None = None) -> None:
        assert (share is None) != shards, "the function gets a share exactly where gradients are sharded"
        mine = gradient if share is None else share
        calls.append((gradient.numel(), mine.numel()))
        whole = gradient.clone()
        dist.all_reduce(whole)
        mine.copy_(whole.view(size, -1)[rank.index % size]).mul_(2 / rank.world_size)

    as_fsdp1(runs[1].adapter).register_comm_hook(function)
    names = [name for one in runs[1].units for name in one.names]
    for step in range(2):
        calls.clear()
        before = len(runs[1].trace)
        # A function sums four numbers in an order of its own.
        compare_gradients(rank, runs, step, doubled=names, exact=rank.world_size == 2)
        assert all(whole == size * share for whole, share in calls), f"gradients and shares: {calls}"
        found = sorted(share for _, share in calls)
        expected = sorted(one.numel / size for one in runs[1].units)
        assert len(found) == len(expected), f"in {step_label(step)} it is called {len(found)} times"
        assert all(least <= one <= least + 50 for one, least in zip(found, expected, strict=True)), f"shares: {found}"
        kinds = [item.kind for item in runs[1].trace[before:] if item.phase == "backward" and "reduce" in item.kind]
        assert kinds == ["all_reduce"] * len(calls), f"the implementation reduces too: {kinds} for {len(calls)} calls"


@contract("REDUCTION-7")
@needs(Capability.REDUCTION_HOOK)
def test_function_that_cannot_be_called(rank: Rank) -> None:
    """A reduction function that is not callable is refused with its value, and the model trains on."""
    pair = tower(rank)
    nothing: Any = 3
    Refusal(rank, lambda: as_fsdp1(pair.adapter).register_comm_hook(nothing)).check_names("got 3")
    pair.checked_step(rank.batch(0, (4, 9)))


@contract("REDUCTION-6")
@world(4)  # of two ranks all of the division comes before the sum
@needs(Capability.REDUCTION_HOOK, "precision.reduce_dtype")
@SHARDS
def test_writes_of_a_function_in_half_precision(rank: Rank, shards: bool) -> None:
    """In float16, where an average would be divided in two parts, the function's output is divided no further."""
    run = rank.run(
        mixed.Mixed(), units=[["low"], ["high"]], shards=shards, precision=Precision(reduce_dtype=torch.float16)
    )
    dtypes: set[torch.dtype] = set()

    def function(gradient: torch.Tensor, share: torch.Tensor | None = None) -> None:
        mine = gradient if share is None else share
        dtypes.update((gradient.dtype, mine.dtype))
        mine.fill_(3)

    as_fsdp1(run.adapter).register_comm_hook(function)
    run.forward_backward((rank.batch(0, SHAPE),), loss=torch.sum)
    assert dtypes == {torch.float16}, f"the function is given {dtypes}"
    for name, piece in run.adapter.gradients().items():
        found = set() if piece is None else set(piece.tensor.flatten().tolist())
        assert found <= {3.0}, f"gradient of {name!r} has {sorted(found)} where the function wrote 3"


@contract("REDUCTION-7")
@needs(Capability.REDUCTION_HOOK)
def test_a_second_function(rank: Rank) -> None:
    """A second function that replaces all reductions is refused."""
    adapter = run_by_units(rank, models.Tower(dim=9)).adapter
    as_fsdp1(adapter).register_comm_hook(lambda *_: None)
    Refusal(rank, lambda: as_fsdp1(adapter).register_comm_hook(lambda *_: None)).check_names("hook")


@contract("REDUCTION-7")
@world(4)
@needs(Capability.REDUCTION_HOOK, Capability.HYBRID)
def test_function_for_shards_with_replicas(rank: Rank) -> None:
    """On a mesh of shards with replicas a function is refused, because it could not reduce over both."""
    model, mesh = models.Tower(dim=9), rank.mesh((2, 2), NAMES)
    adapter = rank.run(model, units=model.units(), mesh=mesh).adapter
    Refusal(rank, lambda: as_fsdp1(adapter).register_comm_hook(lambda *_: None)).check_names("hybrid")


@contract("REDUCTION-8")
@FREED
@OF_A_UNIT
def test_collectives_of_a_script(rank: Rank, unit: str) -> None:
    """Custom all-gathers and reduce-scatters are called once for each gather and reduction of the unit they are set on.

    They receive tensors that they allocated themselves, and no further collective communicates the unit.
    """
    check_collectives_of_a_script(rank, unit)


@contract("REDUCTION-8")
@world(4)
@needs(Capability.HYBRID)
@FREED
@OF_A_UNIT
def test_collectives_of_a_script_on_replicas(rank: Rank, unit: str) -> None:
    """On replicas, shards that user code's collectives have reduced are then averaged over the replicas."""
    check_collectives_of_a_script(rank, unit, mesh=rank.mesh((2, 2), NAMES))


@contract("REDUCTION-8")
@world(4)
@needs(Capability.RESHARD_TO_SIZE)
@FREED
@OF_A_UNIT
def test_gather_of_a_script_among_fewer_ranks(rank: Rank, unit: str) -> None:
    """Resharded to groups of two, the unit's custom all-gather also gathers it in backward, within the two."""
    gather, pair = Own(), tower(rank, reshard_after_forward=2)
    pair.adapter.change(Settings(custom_all_gather=gather), unit=unit)
    for step in range(2):
        gather.groups.clear()
        pair.checked_step(rank.batch(step, (4, 9)))
        found = [dist.get_process_group_ranks(group) for group in gather.groups]
        two = [rank.index - rank.index % 2, rank.index - rank.index % 2 + 1]
        assert found == [[0, 1, 2, 3], two], f"in {step_label(step)} the custom gather ran among ranks {found}"


def check_collectives_of_a_script(rank: Rank, unit: str, *, mesh: DeviceMesh | None = None) -> None:
    """Train a tower of which one unit has custom collectives."""
    gather, reduce, pair = Own(), Own(), tower(rank, mesh=mesh, reshard_after_forward=True)
    # This changes nothing where the process group has no allocator of its own.
    pair.adapter.change(Settings(allocate_memory_from_process_group_for_comm=True), unit="layers.0")
    pair.adapter.change(Settings(custom_all_gather=gather, custom_reduce_scatter=reduce), unit=unit)
    for step in range(2):
        gather.groups.clear()
        reduce.groups.clear()
        pair.checked_step(rank.batch(step, (4, 9)))
        assert (len(gather.groups), len(reduce.groups)) == (2, 1), (
            f"in {step_label(step)} the unit is gathered {len(gather.groups)} times by the custom gather and reduced "
            f"{len(reduce.groups)} times"
        )
        pair.check_counts("forward", all_gather=4)
        replicas = {"all_reduce": 4} if mesh else {}
        pair.check_counts("backward", all_gather=4, reduce_scatter=4, **replicas)
        pair.check_bytes()
        pair.adapter.change(Settings(allocate_memory_from_process_group_for_comm=False), unit="layers.0")


@contract("REDUCTION-9")
@needs(Capability.UNIT_SETTINGS)
def test_memory_of_a_script(rank: Rank) -> None:
    """Memory that user code allocates for its collectives may lie inside a larger block, as in a memory pool."""
    pair = tower(rank)
    pair.adapter.change(Settings(custom_all_gather=Own(margin=8), custom_reduce_scatter=Own(margin=8)), unit="layers.1")
    for step in range(3):
        # Zeroed gradients keep their memory, and the next are added to them.
        pair.checked_step(rank.batch(step, (4, 9)), set_to_none=False)


@contract("REDUCTION-10")
@needs(Capability.UNIT_SETTINGS, "gradient_divide_factors")
def test_forced_sums(rank: Rank) -> None:
    """A unit set to reduce by sums trains the same, and the setting can be taken back."""
    check_sums_alone(rank)


@contract("REDUCTION-10")
@world(4)
@needs(Capability.UNIT_SETTINGS, "gradient_divide_factors", Capability.HYBRID)
def test_forced_sums_on_replicas(rank: Rank) -> None:
    """On replicas, a unit for which sums are chosen sums its shards over the replicas as well."""
    check_sums_alone(rank, mesh=rank.mesh((2, 2), NAMES))


def check_sums_alone(rank: Rank, *, mesh: DeviceMesh | None = None) -> None:
    """Train a tower of which one unit, and in another step the root's own, are reduced by sums.

    In the last step user code sets the number of ranks as the divide factor, which is the default divisor.
    """
    reduces, pair = {"layers.0": Own(), "layers.1": Own()}, tower(rank, mesh=mesh)
    for name, reduce in reduces.items():
        pair.adapter.change(Settings(custom_reduce_scatter=reduce), unit=name)
    for step, sums in enumerate([False, True, False, True]):
        factor = float(rank.world_size) if step == 3 else None
        pair.adapter.change(
            Settings(force_sum_reduction_for_comms=sums, gradient_divide_factor=factor), unit="layers.1"
        )
        pair.adapter.change(Settings(force_sum_reduction_for_comms=step == 2))  # of the root's own unit alone
        pair.checked_step(rank.batch(step, (4, 9)))
    usual, ops = reduces["layers.0"].ops, reduces["layers.1"].ops
    assert usual == usual[:1] * 4, f"a unit for which nothing was set is reduced by {usual}"
    expected = [usual[0], dist.ReduceOp.SUM] * 2
    assert ops == expected, f"with sums in the second and the fourth step, it is reduced by {ops}"


@contract("REDUCTION-11")
@needs(Capability.UNIT_SETTINGS, "settings.separate_reduce_scatter_group")
@pytest.mark.parametrize("recurse", [False, True])
def test_reductions_have_a_group_of_their_own(rank: Rank, recurse: bool) -> None:
    """Reductions can have a process group other than the gathers', of the same ranks, and return to that one."""
    check_own_groups(rank, recurse, rank.mesh())


@contract("REDUCTION-11")
@world(4)
@needs(Capability.UNIT_SETTINGS, "settings.separate_reduce_scatter_group", Capability.HYBRID)
@pytest.mark.parametrize("recurse", [False, True])
def test_reductions_have_a_group_of_their_own_on_replicas(rank: Rank, recurse: bool) -> None:
    """Reductions within replicas can have a process group other than the gathers', and return to that one."""
    check_own_groups(rank, recurse, rank.mesh((2, 2), NAMES))


@contract("REDUCTION-11")
@needs(Capability.UNIT_SETTINGS, "settings.separate_reduce_scatter_group", Capability.ORDERED_GROUPS)
def test_own_group_in_an_order_that_groups_keep(rank: Rank) -> None:
    """A process group of the reductions' own has its ranks in the order of the gathers' group."""
    check_own_groups(rank, True, rank.mesh(order=(1, 0), keeps="groups"))


def check_own_groups(rank: Rank, recurse: bool, mesh: DeviceMesh) -> None:
    """Give reductions their own process groups in some steps, for all units in the root or for the root's own alone."""
    pair = tower(rank, mesh=mesh)
    gathers, reduces = ({name: Own() for name in ("", "layers.1")} for _ in range(2))
    for name in gathers:
        pair.adapter.change(Settings(custom_all_gather=gathers[name], custom_reduce_scatter=reduces[name]), unit=name)
    for step, separate in enumerate([False, True, False, True]):
        pair.adapter.change(Settings(separate_reduce_scatter_group=separate), recurse=recurse)
        pair.checked_step(rank.batch(step, (4, 9)))
        for name in gathers:
            gather, reduce = gathers[name].groups[-1], reduces[name].groups[-1]
            expected = separate and (recurse or not name)
            where = f"{name or ROOT} in {step_label(step)}"
            assert (gather is not reduce) == expected, f"{where}: another group than the gathers' is {not expected}"
            ranks = dist.get_process_group_ranks(reduce)
            assert ranks == dist.get_process_group_ranks(gather), f"{where} is reduced among ranks {ranks}"
        if separate and recurse:
            (one, other) = (reduce.groups[-1] for reduce in reduces.values())
            assert one is other, f"in {step_label(step)} two units have two groups of their own, where one serves"


@contract("REDUCTION-11")
@world(4)
@needs(Capability.UNIT_SETTINGS, "settings.separate_reduce_scatter_group", "dp_mesh_dims")
def test_settings_where_nothing_is_sharded(rank: Rank) -> None:
    """On a mesh of replicas alone, settings about reduce-scatters are refused, or change nothing."""
    mesh, model = rank.mesh((2, 2), ("dp", "tp")), parallel.MLPStack(5)
    prepare = functools.partial(parallel.spread_mlps, mesh=mesh)
    pair = rank.pair(
        model, units=model.units(), mesh=mesh["dp"], shards=False, prepare=prepare,
        dp_mesh_dims=NamedDimensions(mesh, replicate=("dp",)),
    )  # fmt: skip
    for step, chosen in enumerate([True, False]):
        settings = Settings(separate_reduce_scatter_group=chosen, allocate_memory_from_process_group_for_comm=chosen)
        refusal = Refusal(rank, functools.partial(pair.adapter.change, settings, recurse=True))
        if refusal.text is not None:
            return refusal.check_names("mesh")
        pair.checked_step(rank.batch(step, (4, 5), mesh=mesh["dp"]))


@contract("REDUCTION-12")
@needs(Hardware.ACCELERATOR, Capability.UNIT_SETTINGS, "settings.symm_mem_for_comm")
@pytest.mark.parametrize("sums", [True, False])
def test_symmetric_memory(rank: Rank, sums: bool) -> None:
    """Gathers, and reductions by sums, give the same bits in symmetric memory as in plain buffers, step by step."""
    runs = two_runs(rank, reshard_after_forward=True)
    for run in runs:
        run.adapter.change(Settings(force_sum_reduction_for_comms=sums), recurse=True)
    # After the sums: without them only gathers use it.
    runs[1].adapter.change(Settings(symm_mem_for_comm="NCCL"), recurse=True)
    for step in range(3):
        compare_gradients(rank, runs, step, doubled=())  # of two numbers any sum has the same bits
        for run in runs:
            run.step([(rank.batch(step, (4, 9)),)], loss=models.mean_square)


def two_runs(rank: Rank, **options: Any) -> list[Run]:
    """Two runs of one model, on replicas if there are four ranks."""
    model = models.Tower(dim=9)
    mesh = rank.mesh((2, 2), NAMES) if rank.world_size == 4 else None
    return [rank.run(models.copy_of(model), **{"units": model.units(), "mesh": mesh} | options) for _ in range(2)]


def compare_gradients(
    rank: Rank, runs: Sequence[Run], step: int, *, doubled: Collection[str], times: float = 2, exact: bool = True
) -> None:
    """Train both on two microbatches; the second run's gradients are the first's, or twice these, bit for bit."""
    for run in runs:
        for number in range(2):
            with run.adapter.microbatch(is_last=number == 1):
                run.forward_backward((rank.batch(step, (4, 9), microbatch=number),), loss=models.mean_square)
    usual, found = (run.adapter.gradients() for run in runs)
    for name, piece in usual.items():
        mine = found[name]
        assert (piece is None) == (mine is None), f"only one of the runs has a gradient of {name!r}"
        if exact and piece is not None and mine is not None:
            expected = piece.tensor * (times if name in doubled else 1)
            check_bits(f"gradient of {name!r} in {step_label(step)}", mine.tensor, expected)
    for run in runs:
        run.adapter.zero_grad(set_to_none=True)


@contract("REDUCTION-5")
@world(4)
@pytest.mark.parametrize(
    ("mesh", "shards"),
    [
        (None, True),
        pytest.param((2, 2), True, marks=needs(Capability.HYBRID)),
        pytest.param((4, 1), True, marks=needs(Capability.HYBRID, Capability.SINGLE_RANK)),
        pytest.param(None, False, marks=needs(Capability.NO_SHARD)),
    ],
    ids=["shards", "2x2", "4x1", "replicas-alone"],
)
@pytest.mark.parametrize(
    ("compute", "reduce"),
    [
        pytest.param(*dtypes, id=name, marks=needs(*Precision(param_dtype=dtypes[0], reduce_dtype=dtypes[1]).needs()))
        for name, *dtypes in (
            ("half-to-float", torch.float16, torch.float32),
            ("half", torch.float16, None),
            ("float-to-half", None, torch.float16),
        )
    ],
)
def test_averages_in_two_dtypes(
    rank: Rank, compute: torch.dtype | None, reduce: torch.dtype | None, mesh: tuple[int, int] | None, shards: bool
) -> None:
    """Whatever dtypes units compute and reduce in, sums are divided by the number of ranks, of shards and replicas."""
    run = rank.run(
        shapes.TwoScales(7, 4, 4), units=[["low"]], precision=Precision(param_dtype=compute, reduce_dtype=reduce),
        mesh=rank.mesh(mesh, ("replicate", "shard")) if mesh else None, shards=shards,
    )  # fmt: skip
    for step in range(2):
        run.forward_backward((torch.full((7, 4), 2.0**rank.index, device=rank.device),), loss=torch.sum)
        for name, piece in run.adapter.gradients().items():
            # 1, 2, 4 and 8: exact in every dtype.
            is_average = piece is None or bool((piece.tensor == 15 / 4).all())
            assert is_average, f"the gradient of {name!r} in {step_label(step)} is {piece}, and not 15 / 4"
        run.adapter.zero_grad(set_to_none=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """One way from the gradients of four ranks to their average.

    Attributes:
        options: those of the run.
        mesh: the sizes of replicas and shards, if there are both.
        settings: what user code changes, given the function that it adds; None changes nothing.
        parts: what each microbatch has of the gradients.
        divisor: what the sum is divided by.
        small: by what the smallest gradients are multiplied, where a part of one is divided before it is summed.
        is_replaced: whether user code reduces, with a function of its own.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    mesh: tuple[int, int] | None = None
    settings: Callable[[], Settings] | None = None
    parts: tuple[float, ...] = (1.0,)
    divisor: float = 4.0
    small: float = 1.0
    is_replaced: bool = False


#: The first of two microbatches alone exceeds float16; whoever adds before the reduction exceeds it no further.
TWO: dict[str, Any] = {"parts": (1.0, 0.125), "small": 16.0}
IN_UNITS = (Capability.UNIT_SETTINGS,)
PATHS = {
    "shards": (Path(), ()),
    "2x2": (Path(mesh=(2, 2)), (Capability.HYBRID,)),
    "4x1": (Path(mesh=(4, 1)), (Capability.HYBRID, Capability.SINGLE_RANK)),
    "replicas-alone": (Path(options={"shards": False}), (Capability.NO_SHARD,)),
    "microbatches": (Path(**TWO), ()),
    "deferred": (Path(options={"accumulation": Accumulation()}, **TWO), (Capability.DEFERRED_REDUCTION,)),
    "deferred-all-reduce": (
        Path(options={"accumulation": Accumulation(skips="all-reduce")}, mesh=(2, 2), **TWO),
        (Capability.HYBRID, Capability.DEFERRED_REDUCTION, "accumulation.skips"),
    ),
    "divide-factor": (
        Path(options={"gradient_divide_factors": {"low": 16.0, "": 16.0}}, divisor=16.0, small=16.0),
        ("gradient_divide_factors",),
    ),
    "divide-factor-2x2": (
        Path(options={"gradient_divide_factors": {"low": 16.0, "": 16.0}}, mesh=(2, 2), divisor=16.0, small=16.0),
        ("gradient_divide_factors", Capability.HYBRID),
    ),
    "sums": (
        Path(settings=lambda: Settings(force_sum_reduction_for_comms=True)),
        (*IN_UNITS, "gradient_divide_factors"),
    ),
    "own-group": (
        Path(settings=lambda: Settings(separate_reduce_scatter_group=True)),
        (*IN_UNITS, "settings.separate_reduce_scatter_group"),
    ),
    "own-reduce-scatter": (Path(settings=lambda: Settings(custom_reduce_scatter=Own())), IN_UNITS),
    "function-after": (Path(settings=lambda: Settings(all_reduce_hook=lambda share: None)), IN_UNITS),
    "function-in-place": (Path(is_replaced=True), (Capability.REDUCTION_HOOK,)),
}
#: For each dtype a sum beyond it, or at the end of its range, and a gradient that may be halved once. A part of the
#: division must precede the sum in float16 and need not in bfloat16, whose range is that of float32.
LIMITS = {torch.float16: (81920.0, 2.0**-23), torch.bfloat16: (2.0**127, 2.0**-124)}


@contract("REDUCTION-13")
@world(4)  # of two ranks all of the division may come before the sum
@needs("precision.reduce_dtype")
@pytest.mark.parametrize("dtype", LIMITS, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("path", [pytest.param(name, marks=needs(*names)) for name, (_, names) in PATHS.items()])
def test_values_near_the_limits_of_the_reduce_dtype(rank: Rank, path: str, dtype: torch.dtype) -> None:
    """On every path of a reduction the average is right where sums exceed float16, and small gradients are not lost.

    In bfloat16 the sum is at the end of its range and the small gradients at the other, where float16 has neither. The
    parameters are of float32. Every partial sum is exact, in any order.
    """
    chosen, _ = PATHS[path]
    run = rank.run(
        shapes.TwoScales(7, 4, 4), units=[["low"]], precision=Precision(reduce_dtype=dtype),
        microbatches=len(chosen.parts), mesh=rank.mesh(chosen.mesh, NAMES) if chosen.mesh else None, **chosen.options,
    )  # fmt: skip
    if chosen.settings is not None:
        for unit in ("low", ""):
            run.adapter.change(chosen.settings(), unit=unit)
    if chosen.is_replaced:
        as_fsdp1(run.adapter).register_comm_hook(average_in_float64)
    large, small = LIMITS[dtype]
    mine = torch.full((7, 4), small * chosen.small, device=rank.device)
    averaged = mine * (rank.world_size / chosen.divisor * sum(chosen.parts))
    mine[::2] = large / rank.world_size * (1.5, 0.5, 1.0, 1.0)[rank.index]
    averaged[::2] = large / chosen.divisor * sum(chosen.parts)
    for step in range(2):
        for number, part in enumerate(chosen.parts):
            with run.adapter.microbatch(is_last=number == len(chosen.parts) - 1):
                run.forward_backward((mine * part,), loss=torch.sum)
        for name, piece in run.adapter.gradients().items():
            where = f"gradient of {name!r} in {step_label(step)}, near the limits of {str(dtype).partition('.')[2]}"
            assert piece is not None, f"{where}: there is none"
            check_bits(where, piece.tensor, piece.cut(averaged), sides="gradient and average of the ranks")
        run.adapter.zero_grad(set_to_none=step == 0)


def average_in_float64(gradient: torch.Tensor, share: torch.Tensor | None = None) -> None:
    """Reduce in place of the implementation, which must leave the gradients of the rank as they are."""
    mine, whole = gradient if share is None else share, gradient.to(torch.float64)
    dist.all_reduce(whole)
    size = dist.get_world_size()
    parts = 1 if share is None else size
    mine.copy_(whole.view(parts, -1)[dist.get_rank() % parts] / size)


@contract("REDUCTION-3")
@world(2, 4)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_in_its_element(rank: Rank, value: float) -> None:
    """A NaN or an inf in one rank's gradient reaches that element of the average, and no other."""
    run = rank.run(mixed.Mixed(), units=[["low"], ["high"]])
    place = (1, 2)
    for step in range(2):
        x = rank.batch(step, SHAPE)
        if rank.index == 1:
            x[place] = value
        run.forward_backward((x,), loss=torch.sum)
        nothing = torch.zeros(SHAPE, dtype=torch.bool, device=rank.device)
        hit = nothing.clone()
        hit[place] = True
        for name, piece in run.adapter.gradients().items():
            # With flat parameters a rank has no gradient of a parameter of which it holds no element.
            if piece is None:
                continue
            # The gradient of an addend does not depend on the input.
            expected = piece.cut(nothing if name.endswith("shift") else hit)
            found = ~piece.tensor.isfinite()
            where = f"gradient of {name!r} in {step_label(step)}: not finite are {int(found.sum())} elements"
            assert torch.equal(found, expected), f"{where} of this rank's part instead of {int(expected.sum())}"
        run.adapter.zero_grad(set_to_none=True)


@contract("REDUCTION-3")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_fresh_memory_is_not_read(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Uninitialized memory reaches no gradient, no norm and no parameter."""
    clip = Clip(0.01) if Capability.CLIPPING in rank.implementation.capabilities() else None
    pair = tower(rank, reshard_after_forward=reshard_after_forward, clip=clip)
    for step in range(3):
        with memory_of_nan():
            pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contextlib.contextmanager
def memory_of_nan() -> Iterator[None]:
    """Fill every new tensor without values with NaN, as torch does while algorithms must be deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contract("REDUCTION-4")
@needs(Capability.AUTOGRAD_CALLS)
@pytest.mark.parametrize(
    "defers",
    [
        False,
        pytest.param(True, marks=needs(Capability.DEFERRED_REDUCTION)),
        pytest.param("in-float32", marks=needs(Capability.DEFERRED_REDUCTION, *IN_FLOAT32.needs())),
    ],
)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_gradients_of_gradients(rank: Rank, reshard_after_forward: bool | None, defers: bool | str) -> None:
    """A backward that is to make a graph of the gradients makes one for each, or raises on every rank.

    User code adds a penalty on the gradients to a loss: without their graph it has no effect, and no error is raised.
    """
    how = Accumulation() if defers else None
    # Then copies in the reduce dtype are deferred to the last microbatch, and not autograd's own gradients.
    low = IN_FLOAT32 if defers == "in-float32" else Precision()
    runs = two_runs(rank, microbatches=2, accumulation=how, reshard_after_forward=reshard_after_forward, precision=low)
    run = runs[1]

    def backward() -> None:
        for number in range(2):
            with run.adapter.microbatch(is_last=number == 1):
                output = run.adapter.forward(rank.batch(0, (4, 9), microbatch=number))
                models.mean_square(output).backward(create_graph=True)

    refusal = Refusal(rank, backward, may_send=True)
    if refusal.text is None:
        held = run.adapter.held_parameters()
        plain = [name for name, value in held.items() if value.grad is not None and not value.grad.requires_grad]
        assert not plain, f"backward(create_graph=True) returns, and the gradients have no graph of {', '.join(plain)}"
    if Capability.RECOVERY in rank.implementation.capabilities():
        run.adapter.recover()
    run.adapter.zero_grad(set_to_none=True)
    if refusal.text is None or Capability.RECOVERY in rank.implementation.capabilities():
        compare_gradients(rank, runs, 1, doubled=())
