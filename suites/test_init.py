"""Chapter INIT: making a sharded model."""

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from shardproof.suites.apis import fsdp2
from shardproof.testing import (
    Capability,
    Hardware,
    Pair,
    Rank,
    Run,
    alone,
    contract,
    each_value,
    meaningful_from,
    models,
    needs,
    states,
    takes,
    world,
)
from shardproof.testing.axes import FLAT, RESHARD, RESHARD_ROOT
from shardproof.testing.compare import exact_difference, piece_of
from shardproof.testing.make import Accumulation, Adapter, Clip, Precision, pair_by_units, sharded, tower
from shardproof.testing.measure import memory
from shardproof.testing.refuse import Refusal, Untouched
from shardproof.testing.train import batches, checked_steps, mixed, optim, shapes, ties, train_and_check

pytestmark = world(2)


class Named(nn.Module):
    """Two Linear(dim, dim) in a dict of modules. Input and output: (..., dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("first", "second")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


class Nested(nn.Module):
    """Units at three depths: ``blocks.N`` with ``blocks.N.attention`` in it, which has ``projection`` in it.

    Each level computes with parameters of its own before and after it calls the level inside. No two units have the
    same size, so that the bytes of a collective determine its unit.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(_Outer(dim, width) for width in (dim + 1, 3 * dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def units(self) -> list[list[str]]:
        """Lists of module names, one list for each unit, outer modules first."""
        inside = ("", ".attention", ".attention.projection")
        return [[f"blocks.{index}{name}"] for index in range(len(self.blocks)) for name in inside]


class _Outer(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.attention = _Middle(width)
        self.before = nn.Linear(dim, width)
        self.after = nn.Linear(width, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.after(self.attention(torch.tanh(self.before(x)))))


class _Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.projection(self.gain * x)) * self.gain + self.shift


@dataclasses.dataclass(frozen=True)
class Unfit:
    """A model or options that an implementation may refuse.

    Attributes:
        names: words one of which is in the error.
        options: how it should be sharded.
        model: makes a model whose input and output are (batch, 9).
        needs: what has the options, if only some implementations have them.
        may_train: whether an implementation may take it.
        in_parts: whether some units are sharded before the refusal, so that the model is not restored.
        compares: whether a rank may have to ask the others before it can refuse.
        is_tried_again: whether a second forward, too, is to be refused where the first one is.
        repair: removes the cause from the sharded model; None if nothing can.
    """

    names: tuple[str, ...]
    options: Callable[[Rank], dict[str, Any]] = lambda rank: {}
    model: Callable[[], nn.Module] = lambda: models.Tower(dim=9)
    needs: str | None = None
    may_train: bool = True
    in_parts: bool = False
    compares: bool = False
    is_tried_again: bool = True
    repair: Callable[[nn.Module], Any] | None = None


def _frozen(*size: int) -> nn.Module:
    model = shapes.Spoiled(torch.randn(size))
    model.odd.requires_grad_(False)
    return model


def _of_two_dtypes() -> nn.Module:
    return shapes.Spoiled(torch.randn(3, dtype=torch.float64))


IN_LAYER = tuple(f"layers.1.{name}" for name, _ in models.Tower(dim=9).layers[1].named_parameters())

#: What a refusal of a scalar, and one of a second dtype, may name: the parameter, its size or dtype, or the rule.
SCALAR = ("odd", "scalar", "dimension", "[]")
DTYPES = ("float64", "DoubleTensor", "dtype")

OTHER_SIZES: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "a-negative-size": lambda rank: {"reshard_after_forward": -1},
    "no-size": lambda rank: {"reshard_after_forward": 0},
    "a-size-that-is-no-int": lambda rank: {"reshard_after_forward": float(rank.world_size)},
    "a-size-of-all-replicas": lambda rank: {
        "mesh": rank.mesh((rank.world_size, 1), ("replicate", "shard")),
        "reshard_after_forward": rank.world_size,
    },
}
UNFIT = {
    "a-scalar": Unfit(SCALAR, model=lambda: shapes.Spoiled(torch.randn(()))),
    "a-frozen-scalar": Unfit(SCALAR, model=_frozen),
    "strides": Unfit(("odd", "[3, 4]", "contiguous", "stride"), model=lambda: shapes.Spoiled(torch.randn(4, 3).t())),
    "two-dtypes": Unfit(DTYPES, model=_of_two_dtypes, repair=nn.Module.float),
    "two-dtypes-in-a-unit": Unfit(
        DTYPES,
        lambda rank: {"units": [["0"]]},
        lambda: nn.Sequential(_of_two_dtypes(), nn.Linear(9, 9)),
        repair=nn.Module.float,
    ),
    "three-dimensions": Unfit(
        ("mesh",), lambda rank: {"mesh": rank.mesh((1, 1, rank.world_size), ("a", "b", "c"))}, may_train=False
    ),
    "a-size-that-does-not-divide": Unfit(
        ("reshard_after_forward",),
        lambda rank: {"reshard_after_forward": rank.world_size + 1},
        needs=Capability.RESHARD_TO_SIZE,
    ),
    **{
        name: Unfit(("reshard_after_forward",), options, needs=Capability.RESHARD_TO_SIZE, may_train=False)
        for name, options in OTHER_SIZES.items()
    },
    # An implementation that wraps one module takes a list as any module.
    "a-list": Unfit(("ModuleList",), lambda rank: {"units": [["layers"]]}, needs=Capability.GROUPED_UNIT),
    "a-dict": Unfit(
        ("ModuleDict",), lambda rank: {"units": [["layers"]]}, lambda: Named(9), needs=Capability.GROUPED_UNIT
    ),
    "an-uneven-dimension": Unfit(
        ("weight", "[9, 9]"),
        lambda rank: {"shard_dim": lambda one: one.ndim - 1},
        lambda: shapes.Spoiled(torch.randn(3)),
        needs="shard_dim",
    ),
    "no-such-dimension": Unfit(
        ("weight", "[9, 9]"),
        lambda rank: {"shard_dim": lambda one: one.ndim},
        lambda: shapes.Spoiled(torch.randn(3)),
        needs="shard_dim",
        may_train=False,
    ),
    "ignored-by-two-options": Unfit(
        ("ignored",),
        lambda rank: {"ignored_params": ("out.weight", *IN_LAYER), "ignored_modules": ("layers.1",)},
        needs="ignored_modules",
        may_train=False,
    ),
    "no-elements": Unfit(
        ("odd", "Shard(1)"),
        lambda rank: {"shard_dim": lambda one: None if one.numel() else 1},
        lambda: shapes.Spoiled(torch.randn(0, 12)),
        needs="shard_dim",
    ),
    "a-placement-that-cuts-nothing": Unfit(
        ("shard_placement_fn",),
        lambda rank: {"shard_dim": lambda one: Replicate()},
        needs="shard_dim",
        may_train=False,
    ),
    "a-module-once-more": Unfit(
        ("once", "already", "twice", "again"),
        lambda rank: {"units": [["layers.1"], ["layers.1"]], "as_groups": True},  # a mesh whose dimension has no name
        needs="as_groups",
        in_parts=True,
    ),
    "a-module-twice-in-a-unit": Unfit(
        ("once", "already", "twice", "again"),
        lambda rank: {"units": [["layers.1", "layers.1"]]},
        needs=Capability.GROUPED_UNIT,
    ),
    "replicas-without-groups": Unfit(
        ("process group",),
        lambda rank: {"mesh": rank.mesh((1, rank.world_size), ("replicate", "shard")), "default_mesh": True},
        needs=Capability.FSDP1_API,
        may_train=False,
    ),
    "cube-of-replicas": Unfit(
        ("mesh", "dimension"),
        lambda rank: {"mesh": rank.mesh((1, 1, rank.world_size), ("a", "b", "c")), "shards": False},
        needs=Capability.NO_SHARD,
        may_train=False,
    ),
    "integers": Unfit(
        ("integer", "int64", "floating", "order"),
        lambda rank: {"units": [["inner"]]},
        lambda: shapes.Permuted(9),
        needs="flat_parameters",  # other implementations allow integers next to trained ones
        may_train=False,
        in_parts=True,
    ),
    "frozen-beside-trainable": Unfit(
        ("requires_grad", "frozen", "trainable"),
        lambda rank: {"flat_parameters": True, "reshard_after_forward": True},
        lambda: _frozen(3),
        needs="flat_parameters",
    ),
}


@contract("INIT-1")
@needs(Capability.META_DEVICE)
@each_value("which", "own_function")
@pytest.mark.parametrize("which", ["", "layers.1", "start"], ids=["whole-model", "one-unit", "buffers-alone"])
@pytest.mark.parametrize("own_function", [False, True], ids=["reset", "function"])
def test_values_made_on_the_meta_device(rank: Rank, own_function: bool, which: str) -> None:
    """A model that is sharded on the meta device has the values of its modules' initialization, and trains."""
    model = shapes.DrawnStack(dim=9)
    full = copy.deepcopy(model)

    def to_meta(plain: nn.Module) -> nn.Module:
        plain.get_submodule(which).to("meta")
        return plain

    def make(module: nn.Module) -> None:
        if isinstance(module, (shapes.Drawn, shapes.DrawnStack, shapes.Offset)):
            module.to_empty(device=rank.device, recurse=False)
            module.reset_parameters()

    pair = rank.pair(model, units=model.units(), prepare=to_meta, param_init_fn=make if own_function else None)
    check_values(rank, pair.adapter, full)
    train_and_check(pair, batches(rank, 2, (4, 9)))


@contract("INIT-1")
@world(2, 4)
@needs(Capability.META_DEVICE, "sync_module_states")
@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param(False),
        # In a world of two each shard group has one rank.
        pytest.param(True, marks=needs(Capability.HYBRID, Capability.SINGLE_RANK)),
    ],
    ids=["shards", "replicas"],
)
def test_values_of_the_first_rank_fill_the_meta_device(rank: Rank, replicas: bool) -> None:
    """The first rank has the values; the other ranks have a model on the meta device, and receive them."""
    mesh = rank.mesh((2, rank.world_size // 2), ("replicate", "shard")) if replicas else rank.mesh()
    model = shapes.DrawnStack(dim=9)
    full = copy.deepcopy(model)
    options: dict[str, Any] = {"prepare": lambda plain: plain if rank.index == 0 else plain.to("meta")}
    options["param_init_fn"] = lambda module: module.to_empty(device=rank.device, recurse=False)
    pair = rank.pair(model, units=model.units(), mesh=mesh, sync_module_states=True, **options)
    check_values(rank, pair.adapter, full)
    pair.checked_step(rank.batch(0, (4, 9)))


@contract("INIT-12")
@needs("sync_module_states")
def test_ranks_begin_with_values_of_their_own(rank: Rank) -> None:
    """Ranks whose models differ take the parameters and buffers of the first rank, and train as DDP does."""
    model = shapes.DrawnStack(dim=9)
    full = copy.deepcopy(model)

    @torch.no_grad()
    def differ(plain: nn.Module) -> nn.Module:
        for tensor in [*plain.parameters(), *plain.buffers()]:
            tensor.add_(rank.index)
        return plain

    pair = rank.pair(model, units=model.units(), prepare=differ, sync_module_states=True)
    check_values(rank, pair.adapter, full)
    pair.checked_step(rank.batch(0, (4, 9)))


@contract("INIT-2")
@needs(Capability.META_DEVICE, Capability.SHARDED, Hardware.ACCELERATOR)
def test_shards_draw_different_values(rank: Rank) -> None:
    """Random values that are drawn on shards differ between ranks whose generators have the same seed."""
    model = nn.Sequential(nn.Linear(16, 8 * rank.world_size), nn.Linear(8 * rank.world_size, 16))
    torch.manual_seed(rank.seeds.init)
    run = rank.run(model, units=[["0"]], prepare=lambda plain: plain.to("meta"))
    mine = {name: piece.tensor.cpu() for name, piece in run.adapter.parameters().items() if "weight" in name}
    everyone = rank.exchange(mine)
    for other in range(rank.world_size):
        same = [name for name, values in mine.items() if torch.equal(values, everyone[other][name])]
        assert other == rank.index or not same, f"ranks {rank.index} and {other} drew the same values of {same}"
    assert all(values.unique().numel() > values.numel() // 2 for values in mine.values()), "values repeat"


@contract("INIT-4")
@alone()
@needs(Capability.SHARDED, Capability.COUNTED_UNITS, Hardware.ACCELERATOR)
def test_memory_to_shard_a_model_on_the_cpu(rank: Rank) -> None:
    """Sharding a model that lies on the CPU takes the device memory of the shards and of two full units at most.

    One is the unit as it was, the other its copy, in the layout of the shards, from which the shards are cut.
    """
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(10)))
    whole = memory.bytes_of(model.parameters())
    unit = whole // len(model)
    units = [[str(index)] for index in range(len(model))]
    before = memory.held_bytes(rank.device)
    memory.forget_peak(rank.device)
    adapter = sharded(rank, model, units=units)
    peak = memory.peak_bytes(rank.device) - before
    limit = whole // rank.world_size + 2 * unit
    peaks = rank.exchange(peak)
    assert max(peaks) <= limit, f"at most {limit} bytes for {whole} bytes of parameters, but the ranks took {peaks}"
    places = {piece.tensor.device for piece in adapter.parameters().values()}
    assert places == {rank.device}, f"shards on {places}"
    adapter.teardown()


@contract("INIT-5")
@each_value("what")
@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=needs(one.needs) if one.needs else ()) for name, one in UNFIT.items()]
)
def test_models_that_cannot_be_sharded(rank: Rank, what: str) -> None:
    """A module that an implementation cannot shard is refused by name, on every rank, and left unchanged.

    The refusal may come at sharding, or in each forward. If it is not refused, it trains as DDP does.
    """
    refused_or_trained(rank, UNFIT[what])


@contract("INIT-5")
@each_value("what")
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(name, marks=needs(Capability.CAST_AFTER_INIT) if one.repair is nn.Module.float else ())
        for name, one in UNFIT.items()
        if one.repair is not None
    ],
)
def test_model_that_is_repaired_after_a_refusal(rank: Rank, what: str) -> None:
    """A model that the first forward refuses trains as DDP does once the cause is removed.

    An implementation that refuses the model at sharding, or trains it, has nothing to repair.
    """
    unfit = UNFIT[what]
    assert unfit.repair is not None
    unfit_model = unfit.model().to(rank.device)
    model = unfit.repair(copy.deepcopy(unfit_model))
    options = {"prepare": lambda plain: unfit_model, **unfit.options(rank)}
    construction = Refusal(rank, lambda: rank.pair(model, **options), may_send=True)  # the baseline sends
    if construction.text is not None:
        return
    pair: Pair = construction.result
    if Refusal(rank, lambda: pair.adapter.forward(rank.batch(0, (4, 9)))).text is None:
        return
    unfit.repair(pair.adapter.module)
    train_and_check(pair, batches(rank, 2, (4, 9)))


@contract("INIT-5")
@needs(Capability.FSDP2_API)
@each_value("grouped")
@pytest.mark.parametrize("grouped", [False, True])
def test_refuses_a_unit_twice(rank: Rank, grouped: bool) -> None:
    """A module that is a unit is refused as a unit again, by itself or in a list."""
    fsdp = fsdp2(rank)
    model = fsdp.layers()
    fsdp.shard(model[1])
    fsdp.check_refused("once", lambda: fsdp.shard([model[0], model[1]] if grouped else model[1]))


@contract("INIT-5")
@needs(Capability.FSDP2_API, Capability.GROUPED_UNIT)
def test_refuses_a_root_of_two_modules(rank: Rank) -> None:
    """The forward of a unit of two modules is refused where no module around them is a unit."""
    fsdp = fsdp2(rank)
    layers = fsdp.layers()
    fsdp.shard([layers[0], layers[1]])
    fsdp.check_refused("single root", lambda: fsdp.forward(layers))


@contract("INIT-9")
@needs(Capability.FSDP2_API)
def test_units_of_one_class(rank: Rank) -> None:
    """Units whose modules are of one class, sharded alone or in a list, are of one class too, a subclass of it."""
    fsdp = fsdp2(rank)
    layers: Any = nn.Sequential(fsdp.layers(), fsdp.layers(), nn.Tanh())
    for module in ([layers[0][0], layers[0][1]], *layers[1], *layers[:2], layers):
        fsdp.shard(module)
    linear = {type(module) for module in (*layers[0], *layers[1])}
    assert len(linear) == 1 and all(issubclass(one, nn.Linear) for one in linear), f"units of Linear are of {linear}"
    kinds = {type(module) for module in (layers[0], layers[1], layers)}
    assert len(kinds) == 1 and type(layers[2]) is nn.Tanh, f"units of Sequential are of {kinds}"


@contract("INIT-9")
@needs(Capability.FSDP2_API, Capability.GROUPED_UNIT)
def test_names_of_units_in_a_profile(rank: Rank) -> None:
    """A profile has ranges of each unit with its name, which for a unit of several modules is all of theirs."""
    fsdp = fsdp2(rank)
    layers = nn.Sequential(*fsdp.layers(), nn.Linear(4, 4).to(fsdp.device))
    for module in ([layers[0], layers[1]], layers[2], layers):
        fsdp.shard(module)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        fsdp.forward(layers)
    names = {event.name for event in profiler.events() or () if event.name.startswith("FSDP::")}
    for unit in ("(0, 1)", "(2)"):
        assert any(name.endswith(unit) for name in names), f"no range is named {unit}: {', '.join(sorted(names))}"


@contract("INIT-5")
@needs(Capability.FSDP2_API)
def test_refuses_a_unit_of_another_root(rank: Rank) -> None:
    """The forward of a model is refused if one of its units has run before in another model."""
    fsdp = fsdp2(rank)
    first = fsdp.sharded()
    fsdp.forward(first)
    other = nn.Sequential(first[0], *fsdp.layers())
    fsdp.shard(other)
    fsdp.check_refused("lazily", lambda: fsdp.forward(other))


@contract("INIT-5")
@needs(Capability.FSDP2_API, "dp_mesh_dims")
def test_refuses_named_dimensions_of_a_mesh_without_names(rank: Rank) -> None:
    """Named data-parallel dimensions are refused for a mesh whose dimensions have no names."""
    fsdp = fsdp2(rank)
    dimensions = type(fsdp.adapter).mesh_dims(shard="dp")
    mesh = fsdp.without_names(-1, 1)
    fsdp.check_refused("mesh_dim_names", lambda: fsdp.shard(fsdp.layers(), mesh=mesh, dp_mesh_dims=dimensions))


@contract("INIT-5")
@needs(Capability.FSDP2_API)
def test_refuses_replicas_on_a_mesh_without_names(rank: Rank) -> None:
    """A mesh of two dimensions, replicas and shards, is refused if these have no names."""
    fsdp = fsdp2(rank)
    fsdp.check_refused("mesh_dim_names", lambda: fsdp.sharded(mesh=fsdp.without_names(1, -1)))


@contract("INIT-5")
@needs(Capability.FSDP2_API)
def test_refuses_tensor_parallel_layers_on_a_mesh_without_names(rank: Rank) -> None:
    """A data-parallel mesh without names is refused for layers that tensor parallelism has cut."""
    fsdp = fsdp2(rank)
    ranks = fsdp.mesh.size()
    both = DeviceMesh(fsdp.mesh.device_type, fsdp.mesh.mesh.view(ranks, 1), mesh_dim_names=("dp", "tp"))
    layers = parallelize_module(fsdp.layers(), both["tp"], {"0": ColwiseParallel()})
    fsdp.check_refused("mesh_dim_names", lambda: fsdp.shard(layers, mesh=fsdp.without_names(ranks)))


@contract("INIT-5")
@needs(Capability.FSDP2_API)
def test_refuses_another_placement(rank: Rank) -> None:
    """A function that chooses a placement other than a shard is refused."""
    fsdp = fsdp2(rank)
    fsdp.check_refused("shard_placement_fn", lambda: fsdp.sharded(shard_placement_fn=lambda parameter: Replicate()))


@contract("INIT-5")
@needs(Capability.FSDP2_API)
def test_refuses_a_stream_for_replicas(rank: Rank) -> None:
    """A stream for the hook after all-reduces is refused where there are replicas, and the hook then never runs."""
    fsdp = fsdp2(rank)
    mesh = DeviceMesh(fsdp.mesh.device_type, fsdp.mesh.mesh.view(-1, 1), mesh_dim_names=("replicate", "shard"))
    layers, calls = fsdp.sharded(mesh=mesh), list[torch.Tensor]()
    fsdp.check_refused("HSDP", lambda: layers[0].set_all_reduce_hook(calls.append, stream=object()))
    fsdp.forward(layers).sum().backward()
    assert not calls, "the function that was refused runs all the same"


@contract("INIT-5")
@needs(Capability.FSDP2_API)
def test_refuses_a_plain_parameter(rank: Rank) -> None:
    """The first forward is refused, by name, if user code has replaced a shard with a plain parameter."""
    fsdp = fsdp2(rank)
    model = fsdp.sharded()
    model[0].weight = nn.Parameter(torch.ones(4, 4, device=fsdp.device))
    fsdp.check_refused("weight", lambda: fsdp.forward(model))


@contract("INIT-5")
@needs(Capability.META_LOAD)
@pytest.mark.parametrize("which", ["", "layers.1"], ids=["whole-model", "one-unit"])
def test_forward_on_the_meta_device(rank: Rank, which: str) -> None:
    """The forward of a model that is still on the meta device, all or one unit, is refused by the root's names for it.

    A second forward, and a call that gathers it, are refused too.
    """
    model = models.Tower(dim=9).to(rank.device)
    names = [name for name, _ in model.named_parameters() if name.startswith(which)]
    model.get_submodule(which).to("meta")
    adapter = sharded(rank, model, units=model.units(), materialize=False)
    for _ in range(2):
        refusal = Refusal(rank, lambda: adapter.forward(rank.batch(0, (4, 9))))
        refusal.check_names(*names)
    if Capability.ASYNC_UNSHARD in rank.implementation.capabilities():
        # Units before it are gathered.
        Refusal(rank, lambda: adapter.unshard(waits=True), may_send=True).check_names(*names)


@contract("INIT-5")
@needs(Capability.META_LOAD, Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD, Capability.FULL_STATE_DICT)
@each_value("moved")
@pytest.mark.parametrize("moved", ["before-sharding", "before-forward", "after-forward"])
def test_offloaded_parameters_elsewhere(rank: Rank, moved: str) -> None:
    """Offloaded parameters that are not on the CPU are refused by name, or used; loaded on the CPU they are used."""
    model = models.Tower(dim=9)
    plain, batch = models.copy_of(model).to(rank.device), rank.batch(0, (4, 9))
    with torch.no_grad():
        expected = plain(batch)

    def away() -> Run:
        run = rank.run(
            models.copy_of(model), units=model.units(), offload="pageable", materialize=False,
            prepare=lambda one: one.to("meta") if moved == "before-sharding" else one,
        )  # fmt: skip
        if moved == "after-forward":
            run.evaluate((batch,))
        if moved != "before-sharding":
            # To another device; a CPU has none but this.
            run.adapter.module.to("meta" if rank.device.type == "cpu" else rank.device)
        return run

    run = away()
    refusal = Refusal(rank, lambda: run.evaluate((batch,)))
    if moved == "after-forward" and refusal.text is None:
        assert torch.equal(refusal.result[0], expected), "the forward neither uses the old values nor raises"
    else:
        refusal.check_names(*(name for name, _ in model.named_parameters()))
    run = away()  # not every implementation can continue after a refusal
    run.adapter.module.to_empty(device="cpu")
    run.adapter.restore({"model": copy.deepcopy(plain).cpu().state_dict()}, form="full")
    (found,) = run.evaluate((batch,))
    assert torch.equal(found, expected), "the forward does not use what was loaded"


@contract("INIT-5")
@needs(Capability.META_DEVICE, Capability.FSDP1_API)  # there a user function is an option, and not called
def test_function_that_cannot_be_called(rank: Rank) -> None:
    """An initialization function for the meta device that cannot be called is refused by its value."""
    model = models.Tower(dim=9).to("meta")
    Refusal(rank, lambda: sharded(rank, model, units=model.units(), param_init_fn=3)).check_names(
        "Expected 3", "param_init_fn"
    )


@contract("INIT-6")
@pytest.mark.parametrize("units", [[["first"]], [["first"], ["second"]]], ids=["unit-and-root", "two-units"])
@FLAT
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_parameter_of_two_units(rank: Rank, again: bool, flat: bool, units: list[list[str]]) -> None:
    """A parameter that modules of two units share trains as one, or is refused by name; never as two."""
    options = {"units": units, "flat_parameters": flat}
    unfit = Unfit(("weight",), lambda _: options, lambda: ties.TiedMLP(9), in_parts=True, is_tried_again=again)
    refused_or_trained(rank, unfit)


@contract("INIT-8")
@world(3, 6)
@pytest.mark.parametrize(
    "reshard_after_forward",
    [*RESHARD[:3], pytest.param(3, marks=[needs(Capability.RESHARD_TO_SIZE), meaningful_from(6)])],
)
def test_other_numbers_of_ranks(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Three and six ranks train as DDP does: uneven shapes, microbatches, and resharding to group sizes that divide."""
    pair = rank.pair(shapes.ManyShapes(), units=[["body"]], reshard_after_forward=reshard_after_forward, microbatches=2)
    train_and_check(pair, batches(rank, 2, (2, 3, 6, 6), microbatches=2))


@contract("INIT-8")
@world(3, 6)
@needs(Capability.CLIPPING, Capability.CLIP_EMPTY_SHARDS)
def test_clipping_on_other_numbers_of_ranks(rank: Rank) -> None:
    """The total norm and the clipped gradients are those of DDP, on replicas too where the ranks can be divided."""
    replicas = rank.world_size == 6 and Capability.HYBRID in rank.implementation.capabilities()
    mesh = rank.mesh((2, 3), ("replicate", "shard")) if replicas else rank.mesh()
    pair = tower(rank, dim=7, mesh=mesh, clip=Clip(0.01))
    train_and_check(pair, batches(rank, 2, (4, 7)))


@contract("INIT-9")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_nested_units(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Units within units, three deep, train as DDP does."""
    pair = pair_by_units(rank, Nested(dim=9), reshard_after_forward=reshard_after_forward)
    train_and_check(pair, batches(rank, 3, (4, 9)), set_to_none="even")


@contract("INIT-9")
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_nested_units_are_gathered_apart(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A parameter belongs to the innermost unit around it; each unit is gathered when it runs, and reduced once."""
    model = Nested(dim=9)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    expected = ["(root)", *(name for (name,) in model.units())]
    in_backward = len(expected) - 1 if reshard_after_forward is None else len(expected) * bool(reshard_after_forward)
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        gathered = [item.unit for item in pair.last_trace() if item.phase == "forward"]
        assert gathered == expected, f"forward gathers {gathered}"
        pair.check_counts("backward", all_gather=in_backward, reduce_scatter=len(expected))
        pair.check_bytes()


@contract("INIT-10")
@world(4)
@needs("as_groups")  # an engine that uses all ranks accepts no others
@pytest.mark.parametrize("as_groups", [False, True])
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_part_of_the_world_in_another_order(rank: Rank, reshard_after_forward: bool | None, as_groups: bool) -> None:
    """Ranks 3 and 1 train one model, ranks 2 and 0 another, given as a mesh or as a process group."""
    mesh = rank.mesh((2, 2), ("models", "dp"), order=(3, 1, 2, 0))
    torch.manual_seed(rank.seeds.init + rank.index % 2)
    pair = tower(rank, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward, as_groups=as_groups)
    train_and_check(pair, batches(rank, 3, (4, 9)))
    check_groups(pair.last_trace(), mesh["dp"])


@contract("INIT-10")
@world(2, 4)
@needs("default_mesh")
def test_all_ranks_by_default(rank: Rank) -> None:
    """Without a mesh or process groups all ranks train one model, on the accelerator if the host has one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if (accelerator.type if accelerator else "cpu") != rank.device.type:
        return  # the ranks run on the CPU of a host with an accelerator
    pair = tower(rank, default_mesh=True)
    train_and_check(pair, batches(rank, 2, (4, 9)))
    check_groups(pair.last_trace(), rank.mesh())


@contract("INIT-10")
@world(4)
@needs(Capability.HYBRID)
@pytest.mark.parametrize("as_groups", [False, pytest.param(True, marks=needs("as_groups"))])
def test_replicas_in_another_order(rank: Rank, as_groups: bool) -> None:
    """On a (replicate, shard) mesh of the ranks in another order, shards lie as the mesh has them."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"), order=(3, 1, 2, 0))
    pair = tower(rank, mesh=mesh, as_groups=as_groups)
    train_and_check(pair, batches(rank, 2, (4, 9)))
    check_groups(pair.last_trace(), mesh["replicate"], mesh["shard"])


@contract("INIT-10")
@world(4, 6)
@needs(Capability.HYBRID)
def test_replicas_in_different_orders(rank: Rank) -> None:
    """A mesh whose replicas have their ranks in different orders is refused, or the model trains as DDP does.

    Process groups sort their ranks, so that on such a mesh the ranks of a replicate group hold different shards.
    """
    order = (3, 1, 0, 2) if rank.world_size == 4 else (0, 1, 2, 3, 5, 4)  # all replicas, or the last alone
    mesh = rank.mesh((rank.world_size // 2, 2), ("replicate", "shard"), order=order)
    refused_or_trained(rank, Unfit(("mesh",), lambda _: {"mesh": mesh}, compares=True))


#: What keeps an order of ranks that is not sorted.
KEEPS = pytest.mark.parametrize(
    "keeps",
    [
        pytest.param("groups", marks=needs(Capability.ORDERED_GROUPS)),
        pytest.param("mesh", marks=needs(Capability.ORDERED_MESHES)),
    ],
)


@contract("INIT-10")
@world(2)
@KEEPS
def test_order_that_groups_keep(rank: Rank, keeps: Any) -> None:
    """On ranks in an order that their group keeps, shards lie in that order, and full tensors are the parameters."""
    model, mesh = models.Tower(dim=9), rank.mesh(order=(1, 0), keeps=keeps)
    whole = {name: value.detach().clone() for name, value in model.to(rank.device).named_parameters()}
    shown = rank.run(models.copy_of(model), units=model.units(), mesh=mesh).adapter.held_parameters()
    joined = {name: value.full_tensor().detach() for name, value in shown.items() if isinstance(value, DTensor)}
    wrong = [name for name, value in joined.items() if exact_difference(value, whole[name]) is not None]
    assert not wrong, f"the full tensors of {wrong} are not the parameters"
    pair = tower(rank, mesh=mesh)
    train_and_check(pair, batches(rank, 2, (4, 9)))
    check_groups(pair.last_trace(), mesh)


@contract("INIT-10")
@world(4)
@needs(Capability.HYBRID)
@KEEPS
def test_different_orders_that_groups_keep(rank: Rank, keeps: Any) -> None:
    """Replicas whose ranks are in different orders train if the groups keep these: shards lie as the mesh has them."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"), order=(0, 1, 3, 2), keeps=keeps)
    pair = tower(rank, mesh=mesh)
    train_and_check(pair, batches(rank, 2, (4, 9)))
    check_groups(pair.last_trace(), mesh["replicate"], mesh["shard"])


@contract("INIT-10")
@world(4)
@needs(Capability.HYBRID, Capability.ORDERED_GROUPS)
def test_groups_in_another_order_than_the_mesh(rank: Rank) -> None:
    """A mesh made of groups, one of which has its ranks in another order, is refused by those ranks, or trains."""
    names = ("replicate", "shard")
    plain, kept = rank.mesh((2, 2), names), rank.mesh((2, 2), names, order=(0, 1, 3, 2), keeps="groups")
    groups = [plain.get_group(0), kept.get_group(1)]
    mesh = DeviceMesh.from_group(groups, rank.device.type, mesh=plain.mesh, mesh_dim_names=names)
    text = None
    try:
        sharded(rank, models.Tower(dim=9).to(rank.device), mesh=mesh)
    except ValueError as error:
        text = str(error)
    texts = rank.exchange(text)
    if any(texts):
        assert all("mesh" in found for found in texts[2:]), f"the ranks of the second replica raise {texts[2:]}"
        return
    train_and_check(tower(rank, mesh=mesh), batches(rank, 2, (4, 9)))


def refused_or_trained(rank: Rank, unfit: Unfit) -> None:
    """Check that an implementation refuses a model, when it shards it or in the first forward, or trains it."""
    model, batch = unfit.model().to(rank.device), rank.batch(0, (4, 9))
    whole, untouched = copy.deepcopy(model), Untouched(model)
    options = unfit.options(rank)
    # With an optimizer: an implementation that shards only the optimizer's state looks at the parameters there.
    attempt = functools.partial(sharded, rank, model, optimizer=optim.sgd(), **options)
    construction = Refusal(rank, attempt, may_send=unfit.compares)
    if construction.text is not None or not unfit.may_train:
        construction.check_names(*unfit.names)
        if not unfit.in_parts:
            untouched.check(batch)
        return
    adapter: Adapter = construction.result
    first = Refusal(rank, lambda: adapter.forward(batch))
    if first.text is None:
        shown = adapter.held_parameters()  # registered parameters may be gathered
        strides = {name: whole.get_parameter(name).stride() for name, one in shown.items() if isinstance(one, DTensor)}
        other = [name for name, stride in strides.items() if shown[name].stride() != stride]
        assert not other, f"sharded with other strides: {other}"
        # The model computes in float32, also the gradient of a parameter in float64.
        pair = rank.pair(whole, compared_as=torch.float32, **options)
        train_and_check(pair, batches(rank, 2, (4, 9)))
        return
    first.check_names(*unfit.names)
    if unfit.is_tried_again:
        Refusal(rank, lambda: adapter.forward(batch)).check_names(*unfit.names)


def check_groups(trace: Any, *dimensions: DeviceMesh) -> None:
    """The collectives run among the ranks of these dimensions and among no others."""
    known = [sorted(mesh.mesh.tolist()) for mesh in dimensions]
    stray = [str(item) for item in trace if sorted(item.group) not in known]
    assert not stray, f"collectives on groups other than {known}: {stray}"


def check_values(rank: Rank, adapter: Adapter, full: nn.Module) -> None:
    """Every rank holds its part of the parameters of ``full``, and its buffers, bit for bit (collective)."""
    pieces = adapter.parameters()
    assert pieces.keys() == dict(full.named_parameters()).keys()
    wrong = [name for name, piece in pieces.items() if _differs(piece.tensor, piece.cut(full.get_parameter(name)))]
    buffers = zip(full.named_buffers(), adapter.module.buffers(), strict=True)
    wrong += [name for (name, expected), found in buffers if _differs(piece_of(found).tensor, expected)]
    by_rank = rank.exchange(wrong)
    assert not any(by_rank), f"other values than those that the model's modules make, by rank: {by_rank}"


def _differs(found: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.detach().to(found.device)
    return found.dtype != expected.dtype or exact_difference(found, expected) is not None


@contract("INIT-3")
@world(2, 4)
@needs(Capability.META_LOAD, Capability.FULL_STATE_DICT)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("on_meta", ["others", "all"])
def test_values_of_the_first_rank(rank: Rank, on_meta: str, strict: bool) -> None:
    """Ranks on the meta device take parameters and buffers of the first rank's state dict, also with unknown names.

    Five rows divide by no number of ranks, and of a single one all ranks but the first have an empty shard.
    """

    def made() -> mixed.Mixed:
        model = mixed.Mixed(5)
        model.single = nn.Parameter(torch.randn(1, 4))
        return model

    torch.manual_seed(rank.seeds.init + 1)
    saved, first = made(), rank.index == 0
    units: Any = [["low"], ["high"]]
    prepare: Any = None if first and on_meta == "others" else lambda model: model.to("meta")
    run = rank.run(made(), units=units, prepare=prepare, materialize=False)
    state = copy.deepcopy(saved.state_dict()) if first else {}
    if first and not strict:
        state["stray"] = torch.ones(3)
    run.adapter.restore({"model": state}, form="first-rank", strict=strict)
    expected = {"model": {name: value.clone() for name, value in saved.state_dict().items()}}
    states.check_same(rank, states.read(rank, run), expected)
    twin = rank.run(saved, units=units)
    batch = (rank.batch(0, (5, 4)),)
    outputs, others = run.evaluate(batch), twin.evaluate(batch)
    assert torch.equal(outputs[0], others[0]), "the forward after loading has other values"


BRAIN = Precision(param_dtype=torch.bfloat16, cast_forward_inputs=False)
#: Of each option, by its field of ``Config``: what is given without it, and what with it.
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reshard_after_forward": ({"reshard_after_forward": True}, {"reshard_after_forward": False}),
    "precision.param_dtype": ({}, {"precision": BRAIN}),
    "precision.reduce_dtype": ({}, {"precision": Precision(reduce_dtype=torch.bfloat16, cast_forward_inputs=False)}),
    "ignored_params": ({}, {"ignored_params": ("low.weight",)}),
    "shard_dim": ({}, {"shard_dim": lambda parameter: 1}),
    "gradient_divide_factors": ({}, {"gradient_divide_factors": {"": 3.0}}),
    "accumulation": ({}, {"accumulation": Accumulation()}),
    "clip.max_norm": ({"clip": Clip(1e6)}, {"clip": Clip(1e-3)}),
    "clip.norm_type": ({"clip": Clip(1e-3)}, {"clip": Clip(1e-3, torch.inf)}),
    "clip.error_if_nonfinite": ({"clip": Clip(1e-3)}, {"clip": Clip(1e-3, error_if_nonfinite=True)}),
}


@contract("INIT-11")
@each_value("option")
@pytest.mark.parametrize("option", [pytest.param(name, marks=takes(name)) for name in GIVEN])
def test_option_that_is_given(rank: Rank, option: str) -> None:
    """An option that user code gives is refused, or warned of, or it has its effect: it is not ignored."""
    own, (without, options), model = rank.implementation.option_names[option], GIVEN[option], mixed.Mixed()
    before = trained_with(rank, model, option, without)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = Refusal(rank, lambda: trained_with(rank, model, option, options), may_send=True)
    is_told = given.text is not None or any(own in str(one.message) for one in caught)
    assert is_told or any(rank.exchange(given.result != before)), f"{own!r} is given, and nothing comes of it"


def trained_with(rank: Rank, model: nn.Module, option: str, options: dict[str, Any]) -> str:
    """What a rank sees of a step of two microbatches: collectives, dtypes, gradients and parameters."""
    always: dict[str, Any] = {"units": [["low"], ["high"]], "microbatches": 2, "optimizer": optim.sgd()}
    run = rank.run(models.copy_of(model), must_clip=None, **always, **options)
    batch = [(rank.batch(0, (6, 4), microbatch=number),) for number in range(2)]
    scale = torch.inf if option == "clip.error_if_nonfinite" else 1.0
    step = run.settle(run.step(batch, loss=lambda output: output.sum() * scale))
    collectives = [(item.kind, item.dtype, item.nbytes, item.phase) for item in run.trace]
    pieces = [step.gradients, step.clipped or {}, step.parameters]
    values = [{name: piece and piece.tensor.tolist() for name, piece in one.items()} for one in pieces]
    low: Any = run.original_module("low")
    return repr((collectives, low.seen, values))
