"""Chapter CLIPPING: the norm of all gradients together, and gradients scaled by it."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.axes import FLAT, REPLICAS, subjects
from shardproof.testing.compare import check_bits, full_of
from shardproof.testing.make import Adapter, Clip, cut_over, pair_by_units, pair_of_mlps, run_by_units, tower
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import batches, checked_steps, mixed, optim, parallel, shapes, tokens, train_and_check

pytestmark = [needs(Capability.CLIPPING), world(4)]

ANY = needs("clip.norm_type")
NORMS = [2.0, *(pytest.param(p, marks=ANY) for p in (1.0, math.inf))]
NAMES = ("replicate", "shard")
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


def reductions_of_norm(rank: Rank, *, tensor_parallel: int = 0) -> int:
    """The all-reduces that one norm costs, over as many mesh dimensions as gradients are divided over."""
    return tensor_parallel + ("gradients" in rank.implementation.traits.shards)


@contract("CLIPPING-1")
@world(2, 4, 8)
@pytest.mark.parametrize("norm_type", NORMS)
def test_total_norm_and_clipped_gradients(rank: Rank, norm_type: float) -> None:
    """Every rank computes the norm of the full gradients and clips its share by it."""
    # Every parameter has rows for each of eight ranks: empty shards have a case of their own.
    config = models.TransformerConfig(vocabulary=15, dim=16, heads=4)
    pair = pair_by_units(rank, models.Transformer(config), clip=Clip(max_norm=0.01, norm_type=norm_type))
    train_and_check(pair, tokens(rank, 3, (3, config.length), vocabulary=config.vocabulary))


@contract("CLIPPING-1")
@world(2, 4)
@pytest.mark.parametrize(
    ("scale", "norm_type"),
    # The cube root of float32 is accurate only to some ulps at the ends of its range.
    [(1e-6, 2.0), (1e6, 2.0), pytest.param(1.0, 3.0, marks=ANY)],
)
def test_small_and_large_gradients(rank: Rank, scale: float, norm_type: float) -> None:
    """Neither the 1e-6 of the divisor nor float32's range affects the norm; sizes do not divide by the ranks."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        return models.mean_square(output) * scale

    clip = Clip(max_norm=1e-2 * scale, norm_type=norm_type)
    # Steps as large as those of a run whose loss is not scaled.
    pair = tower(rank, dim=10, clip=clip, optimizer=optim.sgd(lr=0.05 / scale))
    train_and_check(pair, batches(rank, 2, (4, 10)), loss=loss)


@contract("CLIPPING-1")
@world(2, 4)
@needs(Capability.UNUSED_MODULE)
@pytest.mark.parametrize("norm_type", NORMS)
def test_frozen_and_unused_parameters(rank: Rank, norm_type: float) -> None:
    """Parameters without gradient, frozen or not used, add nothing to the norm."""
    model = models.Branches(dim=12)
    for name in ("entry.weight", "branches.1.in_proj.bias"):
        model.get_parameter(name).requires_grad_(False)
    clip = Clip(max_norm=0.01, norm_type=norm_type)
    pair = pair_by_units(rank, model, baseline="replicated", find_unused_parameters=True, clip=clip)
    train_and_check(pair, ((batch, 1) for batch in batches(rank, 2, (4, 12))))  # branches 0 and 2 are not used


@contract("CLIPPING-1")
@world(2, 4)
@needs(Capability.TIED_PARAMETERS)
def test_tied_parameter_counts_once(rank: Rank) -> None:
    """The norm, of each kind, counts the gradient of a parameter that two modules share once."""
    config = models.TransformerConfig(vocabulary=15, is_tied=True)
    has_all = "clip.norm_type" in rank.implementation.capabilities()
    for norm_type in (2.0, 1.0, math.inf) if has_all else (2.0,):
        pair = pair_by_units(rank, models.Transformer(config), clip=Clip(max_norm=0.01, norm_type=norm_type))
        train_and_check(pair, tokens(rank, 2, (3, config.length), vocabulary=config.vocabulary))


@contract("CLIPPING-1")
@world(2)
@needs(Capability.CLIP_BY_CALL, "ignored_params")
@pytest.mark.parametrize("norm_type", NORMS)
def test_ignored_parameter(rank: Rank, norm_type: float) -> None:
    """An ignored parameter, whose gradients are equal on all ranks here, counts once and is scaled with the others."""
    norm = {1.0: 100.0, 2.0: 10.0, math.inf: 1.0}[norm_type]  # of 36 and 64 gradients of 1
    clip = Clip(max_norm=norm / 4, norm_type=norm_type)
    run = rank.run(shapes.TwoScales(4, 9, 16), clip=clip, ignored_params=("weight",))
    run.forward_backward((torch.ones((4, 16), device=rank.device),), loss=torch.sum)
    found = float(run.adapter.norm_value(run.adapter.clip()))
    assert math.isclose(found, norm, rel_tol=1e-6), f"total norm: {found} instead of {norm}"
    for name, piece in run.adapter.gradients().items():
        assert piece is not None, f"{name} has no gradient"
        expected = clip.max_norm / (norm + 1e-6)
        wrong = (piece.tensor.double() / expected - 1).abs() > 4 * torch.finfo(piece.tensor.dtype).eps
        assert not wrong.any(), f"clipped gradient of {name!r}: {piece.tensor.flatten()[:3]} instead of {expected}"


@contract("CLIPPING-6")
@world(2, 4)
@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_below_the_limit(rank: Rank, norm_type: float) -> None:
    """Gradients whose norm is below the limit do not change, and clipping still returns the norm.

    The optimizer has a group of one small parameter, of which a rank may have nothing.
    """

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        *others, last = parameters
        groups: Any = [{"params": others}, {"params": [last]}]
        return optim.sgd()(groups)

    model = models.Tower(dim=10)
    model.out = nn.Linear(10, rank.world_size)
    clip = Clip(max_norm=1e3, norm_type=norm_type)
    pair = pair_by_units(rank, model, clip=clip, must_clip=False, optimizer=optimizer)
    train_and_check(pair, batches(rank, 2, (4, 10)))


@contract("CLIPPING-2")
@world(2, 4)
@needs(Capability.CLIP_BY_CALL, "clip.norm_type")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norm_costs_one_reduction(rank: Rank, norm_type: float) -> None:
    """Clipping over a one-dimensional mesh communicates once, and norms only."""
    pair = tower(rank, dim=10, clip=Clip(max_norm=0.01, norm_type=norm_type))
    train_and_check(pair, batches(rank, 1, (4, 10)))
    if rank.implementation.traits.shards == {"optimizer"}:
        # One rank may own a parameter's full gradient and update it; the norms of the owners are then summed.
        clipping = [item.kind for item in pair.sharded.trace if item.phase == "clip"]
        assert clipping in ([], ["all_reduce"]), f"clipping communicated {clipping}"
    else:
        pair.check_counts("clip", all_reduce=reductions_of_norm(rank))
    # At most two numbers of eight bytes for each parameter: norms, not gradients.
    limit = 16 * len(pair.adapter.named_parameters())
    for item in pair.sharded.trace:
        assert item.phase != "clip" or item.nbytes <= limit, f"clipping moved more than norms: {item}"


@contract("CLIPPING-3")
@world(4, 8)
@needs(Capability.CLIP_EMPTY_SHARDS)
@pytest.mark.parametrize("norm_type", NORMS)
def test_empty_shards(rank: Rank, norm_type: float) -> None:
    """Ranks whose shards are empty, of some parameters or of all, still take part in the norm.

    The second norm is smaller than the first, so that a stale first norm on a rank with an empty shard is noticed.
    """
    pair = rank.pair(models.two_linear((4, 3), (3, 2)), clip=Clip(max_norm=0.01, norm_type=norm_type))
    for step in range(2):
        pair.checked_step(rank.batch(step, (4, 4)), loss=_quarter if step else models.mean_square)


@contract("CLIPPING-3")
@needs(Capability.CLIP_EMPTY_SHARDS)
def test_ranks_without_any_gradient(rank: Rank) -> None:
    """Ranks that hold no element of any parameter still take part in the norm and return it."""
    pair = rank.pair(nn.Linear(2, 1, bias=False), clip=Clip(max_norm=1e-3))
    train_and_check(pair, batches(rank, 2, (4, 2)))


@contract("CLIPPING-4")
@needs(Capability.CLIP_BY_CALL, "clip.norm_type", Capability.TENSOR_PARALLEL)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("dim", [16, 17])
@FLAT
def test_two_dimensions(rank: Rank, flat: bool, dim: int, norm_type: float) -> None:
    """The norm of gradients sharded over both dimensions, or over one, costs one reduction per dimension."""
    mesh, clip = rank.mesh((2, 2), ("dp", "tp")), Clip(max_norm=0.001, norm_type=norm_type)
    pair = pair_of_mlps(rank, mesh, parallel.MLPStack(dim, normed=True), sequence=True, clip=clip, flat_parameters=flat)
    for _ in checked_steps(pair, batches(rank, 3, (2, 6, dim), mesh=mesh["dp"]), loss=models.ramp_square):
        pair.check_counts("clip", all_reduce=reductions_of_norm(rank, tensor_parallel=1))


@contract("CLIPPING-4")
@needs(Capability.CLIP_BY_CALL, "clip.norm_type", Capability.TENSOR_PARALLEL, "flat_parameters")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@FLAT
def test_unit_that_is_cut_in_part(rank: Rank, flat: bool, norm_type: float) -> None:
    """A unit may have tensor-parallel layers next to a plain norm: both count once."""
    mesh, clip = rank.mesh((2, 2), ("dp", "tp")), Clip(max_norm=0.001, norm_type=norm_type)
    options = cut_over(mesh, parallel.parallelize_mlps)
    units = [["layers.0"]]  # the other layer and the norm are the root's
    pair = rank.pair(parallel.MLPStack(17, normed=True), units=units, clip=clip, flat_parameters=flat, **options)
    for _ in checked_steps(pair, batches(rank, 2, (2, 6, 17), mesh=mesh["dp"]), loss=models.ramp_square):
        pair.check_counts("clip", all_reduce=reductions_of_norm(rank, tensor_parallel=1))


@contract("CLIPPING-4")
@needs(Capability.CLIP_BY_CALL, "clip.norm_type", Capability.TENSOR_PARALLEL, "ignored_params")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_ignored_parameters_that_are_cut(rank: Rank, norm_type: float) -> None:
    """Ignored tensor-parallel parameters, equal on all data-parallel ranks, count once, in full."""
    mesh, model = rank.mesh((2, 2), ("dp", "tp")), parallel.MLPStack(16).double()
    batch = torch.linspace(-1, 1, 64, dtype=torch.float64, device=rank.device).view(1, 4, 16)
    plain, clip = models.copy_of(model).to(rank.device), Clip(max_norm=0.001, norm_type=norm_type)
    ignored = tuple(name for name, _ in model.named_parameters() if name.startswith("layers.0."))
    options = cut_over(mesh, parallel.parallelize_mlps)
    run = rank.run(model, units=[["layers.1"]], clip=clip, ignored_params=ignored, **options)
    run.forward_backward((batch,), loss=models.ramp_square)
    models.ramp_square(plain(batch)).backward()
    gradients = [one.grad for one in plain.parameters() if one.grad is not None]
    expected = float(nn.utils.get_total_norm(gradients, norm_type))
    found = float(run.adapter.norm_value(run.adapter.clip()))
    # Another order of summation in float64 changes far less.
    assert math.isclose(found, expected, rel_tol=1e-6), f"total norm: {found} instead of {expected}"


@contract("CLIPPING-5")
@needs(Capability.HYBRID)
@pytest.mark.parametrize("norm_type", NORMS)
@REPLICAS
def test_replicas(rank: Rank, shape: tuple[int, int], norm_type: float) -> None:
    """Replicas hold the same gradients: the norm counts them once, and is reduced within a replica."""
    mesh = rank.mesh(shape, NAMES)
    pair = tower(rank, mesh=mesh, clip=Clip(max_norm=0.01, norm_type=norm_type))
    replica = tuple(mesh["shard"].mesh.tolist())
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        if rank.implementation.traits.clips == "call":
            pair.check_counts("clip", all_reduce=reductions_of_norm(rank) * (shape[1] > 1))
        for item in pair.last_trace():
            assert item.phase != "clip" or item.group == replica, f"{item}: the ranks of this replica are {replica}"


@contract("CLIPPING-7")
@needs(Capability.CLIP_BY_CALL, Capability.SHARDED)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(
    "dtypes",
    [(HALF, HALF), (HALF, SINGLE), (SINGLE, DOUBLE), (DOUBLE, SINGLE)],
    ids=["float16", "float16-32", "float32-64", "float64-32"],
)
def test_gradients_of_two_dtypes(rank: Rank, dtypes: tuple[torch.dtype, torch.dtype], norm_type: float) -> None:
    """Gradients of two dtypes count together, and all are scaled, also if the norm is no number of the narrower."""
    low, own = dtypes
    wide = torch.promote_types(low, own)
    # Each rank holds 9 and 16 elements: 3, 4 and 5 times this in the 2-norm. The largest float16 is 65504.
    value = 24576.0
    more = value if low == own else value * (1 + torch.finfo(wide).eps * 1024)
    of_low, of_root = (more if dtype == wide else value for dtype in dtypes)
    norm = {1.0: 36 * of_low + 64 * of_root, 2.0: math.hypot(6 * of_low, 8 * of_root), math.inf: more}[norm_type]

    def prepare(model: nn.Module) -> nn.Module:
        model.to(own).get_submodule("low").to(low)
        return model

    clip = Clip(max_norm=norm / 4, norm_type=norm_type)
    run = rank.run(shapes.TwoScales(4, 9, 16), units=[["low"]], prepare=prepare, clip=clip)
    # The averages over the ranks are these values; all sums that lead to them are exact.
    mine = torch.full((4, 16), more, dtype=wide, device=rank.device) + 128 * (rank.index - 1.5)
    for _ in range(2):
        run.forward_backward((mine,), loss=torch.sum)
        found = float(run.adapter.norm_value(run.adapter.clip()))
        error = abs(found - norm) / norm / torch.finfo(wide).eps
        # float16 gradients alone may have a float16 norm, which is infinite here; they are still scaled.
        assert error <= 4 or own == low, f"total norm: {found} instead of {norm}, {error:.0f} ulps of {wide} off"
        for name, piece in run.adapter.gradients().items():
            assert piece is not None, f"{name} has no gradient"
            expected = (of_low if name.startswith("low") else of_root) * clip.max_norm / (norm + 1e-6)
            error = float((piece.tensor.double() / expected - 1).abs().max()) / torch.finfo(piece.tensor.dtype).eps
            where = f"clipped gradient of {name!r}"
            assert error <= 4, f"{where}: {piece.tensor.flatten()[:3]} instead of {expected}, {error:.0f} ulps off"
        run.adapter.zero_grad(set_to_none=True)


@contract("CLIPPING-8")
@world(2, 4)
@needs(Capability.CLIP_BY_CALL, Capability.SHARDED)
@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_of_nan(rank: Rank, norm_type: float) -> None:
    """A gradient that is NaN in one element makes the norm NaN on every rank, whichever rank holds the element."""
    run = rank.run(shapes.TwoScales(4, 9, 16), units=[["low"]], clip=Clip(max_norm=1, norm_type=norm_type))
    for row in range(4):
        batch = torch.ones((4, 16), device=rank.device)
        batch[row, 12] = math.nan  # of the root's weight alone
        run.forward_backward((batch,), loss=torch.sum)
        norm = float(run.adapter.norm_value(run.adapter.clip()))
        assert math.isnan(norm), f"the {norm_type}-norm is {norm} with a NaN in row {row}"
        run.adapter.zero_grad(set_to_none=True)


@contract("CLIPPING-9")
@world(2)
@needs(Capability.CLIP_BY_CALL, "clip.error_if_nonfinite", Capability.SHARDED)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(
    # There is one parameter, so that pairs cover every value in every dtype with every norm: only the infinite norm in
    # float64 tells an infinity from the greatest float64.
    "number",
    [
        pytest.param((dtype, value), id=f"{str(dtype).removeprefix('torch.')}-{value}")
        for dtype, value in itertools.product([SINGLE, DOUBLE], [math.inf, math.nan])
    ],
)
def test_norm_that_is_not_finite_raises(rank: Rank, number: tuple[torch.dtype, float], norm_type: float) -> None:
    """With ``error_if_nonfinite``, a norm that is infinite or NaN raises on every rank and scales nothing."""
    dtype, value = number
    clip = Clip(max_norm=1, norm_type=norm_type, error_if_nonfinite=True)
    run = rank.run(shapes.TwoScales(4, 9, 16).to(dtype), units=[["low"]], clip=clip)
    for row in (None, 0, 3):
        batch = torch.ones((4, 16), device=rank.device, dtype=dtype)
        if row is not None:
            batch[row, 12] = value  # of the root's weight alone
        run.forward_backward((batch,), loss=torch.sum)
        before = {name: piece.tensor.clone() for name, piece in run.adapter.gradients().items() if piece is not None}
        error = ""
        try:
            run.adapter.clip()
        except RuntimeError as raised:
            error = str(raised)
        everyone = rank.exchange(error)
        if row is None:
            assert not any(everyone), f"clipping by a finite norm raises: {everyone}"
        else:
            assert all("non-finite" in one for one in everyone), f"a norm with {value} in row {row} raises {everyone}"
            for name, piece in run.adapter.gradients().items():
                assert piece is not None
                same = torch.equal(piece.tensor.view(torch.int32), before[name].view(torch.int32))  # NaN too
                assert same, f"gradient of {name!r} after the error: {piece.tensor}; before it: {before[name]}"
        run.adapter.zero_grad(set_to_none=True)


@contract("CLIPPING-1")
@world(2)
@needs(Capability.CLIP_BY_CALL)
@pytest.mark.parametrize("norm_type", NORMS)
def test_without_any_gradient(rank: Rank, norm_type: float) -> None:
    """Where no parameter has a gradient the norm is zero, before the first backward and after others."""
    run = run_by_units(rank, models.Tower(dim=10), clip=Clip(max_norm=1, norm_type=norm_type))
    for step in range(2):
        norm = float(run.adapter.norm_value(run.adapter.clip()))
        assert norm == 0, f"the norm is {norm} before the backward of step {step}"
        run.forward_backward((rank.batch(step, (4, 10)),), loss=models.mean_square)
        run.adapter.zero_grad(set_to_none=True)


def _quarter(output: torch.Tensor) -> torch.Tensor:
    return models.mean_square(output) / 4


@contract("CLIPPING-10")
@world(2)
@needs(Capability.CLIP_SOME)
@subjects(
    ("foreach", "infinity", "limit"),
    [(None, math.inf, 2.0**-10), (False, math.inf, 2.0**-10), (None, "inf", 2.0**-10), (None, math.inf, 0.0)],
    ids=["lists", "one-by-one", "infinity-as-a-word", "no-norm-at-all"],
)
@pytest.mark.parametrize("names", [("high.weight",), ("low.weight", "high.shift")], ids=["one", "some"])
def test_some_parameters(rank: Rank, names: tuple[str, ...], foreach: bool | None, infinity: Any, limit: float) -> None:
    """The gradients of one parameter, or of a list of some, are clipped by the norm of these alone; others stay.

    Compared bit for bit: the largest gradient of all ranks is the same number on whichever rank it is.
    """
    run = rank.run(mixed.Mixed(), units=[["low"], ["high"]], optimizer=optim.sgd())
    run.forward_backward((rank.batch(0, (6, 4)),), loss=torch.sum)
    adapter = run.adapter
    before = {name: piece.tensor.clone() for name, piece in adapter.gradients().items() if piece is not None}
    parameters = [adapter.held_parameters()[name] for name in names]
    parameters[0].requires_grad_(False)  # a parameter that is frozen after backward still has its gradient
    given = parameters[0] if len(names) == 1 else parameters
    norm = adapter.norm_value(adapter.clip_parameters(given, Clip(limit, infinity), foreach=foreach))
    largest = max(rank.exchange(max(float(before[name].abs().max()) for name in names)))
    assert float(norm) == largest > limit, f"the norm of {', '.join(names)} is {float(norm)} instead of {largest}"
    scale = torch.clamp(limit / (torch.tensor(largest, device=rank.device) + 1e-6), max=1.0)
    for name, piece in adapter.gradients().items():
        assert piece is not None
        expected = before[name] * scale if name in names else before[name]
        check_bits(f"clipped gradient of {name!r}", piece.tensor, expected)


Container = Callable[[Iterable[torch.Tensor]], Any]

#: Numbers in the gradients of two parameters, two of the first and one of the second, by the norm's kind: such that
#: the norm is a whole number, and exact in whatever order and in however many parts it is summed.
WHOLE = {**dict.fromkeys((2.0, 1.0, math.inf, 0.0), (3.0, 4.0, 12.0)), 0.5: (1.0, 4.0, 9.0)}
CONTAINERS: dict[str, Container] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "dict's values": lambda tensors: dict(enumerate(tensors)).values(),
    "generator": lambda tensors: (one for one in tensors),
    "list of none": lambda _: [],
    "tensor": lambda tensors: next(iter(tensors)),
}
#: Container, kind of norm, limit and kernels: each value of each, the others as in the first.
CLIPPED: list[tuple[str, Any, Any, bool | None]] = [
    *((container, 2.0, 0.5, None) for container in CONTAINERS),
    *(("list", kind, 0.5, None) for kind in (2, 1, 1.0, math.inf, "inf", 0.5, 0, 0.0)),
    *(("list", 2.0, limit, None) for limit in (0.0, 0, 1, 6.5, 13.0, 2.0**10, math.inf)),
    *(("list", 2.0, 0.5, foreach) for foreach in (False, True)),
]


def in_one_step(
    adapter: Adapter, given: list[Any], container: Container, kind: Any, limit: Any, foreach: bool | None
) -> Any:
    """The implementation's own call."""
    return adapter.clip_parameters(container(given), Clip(limit, kind), foreach=foreach)


def in_two_steps(_: Any, given: list[Any], container: Container, kind: Any, limit: Any, foreach: bool | None) -> Any:
    """torch's function for the norm of the gradients, and its function that scales by a norm."""
    gradients = container([one.grad for one in given])
    norm: Any = nn.utils.get_total_norm(gradients, kind, foreach=foreach)
    scale: Any = nn.utils.clip_grads_with_norm_
    assert scale(container(given), limit, norm, foreach=foreach) is None, "what scales in place returns something"
    return full_of(norm)


@contract("CLIPPING-12")
@world(2)
@needs(Capability.CLIP_SOME, Capability.DTENSOR_PARAMETERS)
@pytest.mark.parametrize("clip", [in_one_step, in_two_steps])
def test_arguments_of_clipping(rank: Rank, clip: Any) -> None:
    """Any container of parameters, kind of norm, limit and choice of kernels gives what it gives of plain tensors."""
    run = rank.run(mixed.Mixed(), units=[["low"], ["high"]], optimizer=optim.sgd())
    run.forward_backward((rank.batch(0, (6, 4)),), loss=torch.sum)
    names, adapter = ("low.weight", "high.shift"), run.adapter
    for container, kind, limit, foreach in CLIPPED:
        what = f"{kind!r}-norm of a {container}, limit {limit!r}, foreach={foreach}"
        plain = {name: nn.Parameter(torch.zeros(6, 4, device=rank.device)) for name in names}
        gradients = {name: torch.zeros(6, 4, device=rank.device) for name in names}
        first, last, other = WHOLE[float(kind)]
        for name, ends in zip(names, [(first, last), (0.0, other)], strict=True):
            gradients[name][0, 0], gradients[name][-1, -1] = ends
            plain[name].grad = gradients[name]
        pieces = {name: piece for name, piece in adapter.gradients().items() if name in names and piece is not None}
        for name, piece in pieces.items():
            piece.tensor.copy_(piece.cut(gradients[name]))
        held = adapter.held_parameters()
        norm = clip(adapter, [held[name] for name in names], CONTAINERS[container], kind, limit, foreach)
        found = float(adapter.norm_value(norm))
        if float(kind) == 0:
            # The elements that are not zero, or as torch has it the tensors with any: no norm, but a number to clip by.
            assert found in (2.0, 3.0), f"{what}: {found} instead of 3 elements or 2 tensors"
            nn.utils.clip_grads_with_norm_(plain.values(), limit, torch.tensor(found, device=rank.device))
        else:
            of_plain = nn.utils.clip_grad_norm_(CONTAINERS[container](plain.values()), limit, kind, foreach=foreach)
            assert found == float(of_plain), f"{what}: {found} instead of {float(of_plain)}"
        for name, piece in pieces.items():
            check_bits(f"{what}: gradient of {name!r}", piece.tensor, piece.cut(gradients[name]))


@contract("CLIPPING-11")
@world(2)
@needs(Capability.CLIP_SOME, Capability.DTENSOR_PARAMETERS)
def test_gradient_that_is_a_pending_sum(rank: Rank) -> None:
    """A gradient that ranks have yet to sum is clipped by the norm of the sum, or it is refused."""
    adapter = rank.run(mixed.Mixed(), units=[["low"], ["high"]], optimizer=optim.sgd()).adapter
    mesh, ones = rank.mesh(), torch.ones(4, device=rank.device)
    parameter = nn.Parameter(DTensor.from_local(ones, mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(ones * (1 + rank.index), mesh, [Partial()])
    refusal = Refusal(rank, lambda: adapter.clip_parameters([parameter], Clip(0.5, math.inf), foreach=None))
    if refusal.text is not None:
        refusal.check_names("pending", "Partial")
        return
    norm = float(adapter.norm_value(refusal.result))
    assert norm == 3, f"the largest element of 1 and 2 on two ranks, together, has the norm {norm}"
