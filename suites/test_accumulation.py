"""Chapter ACCUMULATION: gradients of several microbatches add up, and are reduced as often as configured."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardproof.suites.pipelines import DEPTHS, train_stages
from shardproof.testing import Capability, Hardware, Rank, Run, contract, each_value, models, needs, world
from shardproof.testing.axes import FLAT, RESHARD, RESHARD_CHOICES, RESHARD_EXPLICIT
from shardproof.testing.compare import (
    Piece,
    backward_of_copies,
    check_bits,
    check_gradients,
    each_once,
    in_one_tensor_with,
    step_label,
)
from shardproof.testing.make import (
    Accumulation,
    FullParams,
    pair_by_units,
    run_and_plain,
    run_by_units,
    tower,
    two_runs,
)
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import after_microbatches, batches, checked_steps, tokens, train_and_check

pytestmark = world(2)

DIM = 9
DEPTH = 3
UNITS = DEPTH + 1  # the root has parameters of its own
MICROBATCHES = 3

PER_UNIT = needs("accumulation.units")
ROOT_ONLY = pytest.param("root-only", marks=PER_UNIT)
SOME = pytest.param(("layers.0", "layers.1"), marks=PER_UNIT, id="some")
WAITING = pytest.mark.parametrize("waiting", ["all", ROOT_ONLY, SOME])
OFFLOADED = needs(Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD)
PINNED = needs(Capability.OFFLOAD, Hardware.ACCELERATOR)
#: Offloading is crossed with one way of resharding, as in the seeds.
RESHARD_AND_OFFLOAD = pytest.mark.parametrize(
    ("reshard_after_forward", "offload"),
    [
        *(pytest.param(*item.values, None, marks=item.marks) for item in RESHARD_EXPLICIT),
        pytest.param(True, "pageable", marks=[*RESHARD_CHOICES[0].marks, OFFLOADED]),
        pytest.param(True, "pinned", marks=[*RESHARD_CHOICES[0].marks, PINNED]),
    ],
)
KEPT_MARKS = RESHARD_CHOICES[1].marks
COUNTED = needs(Capability.DEFERRED_REDUCTION, Capability.COUNTED_UNITS)
ALL_REDUCE = needs("accumulation.skips")
WHOLE = needs(Capability.SUMMON_FULL_PARAMS)
ROOT_TOO = needs(Capability.ROOT_RESHARD)


def reductions(waiting: str | tuple[str, ...]) -> int:
    """The number of reductions in a step, with the reductions of these units deferred to the last microbatch."""
    number = {"all": UNITS, "root-only": 1}[waiting] if isinstance(waiting, str) else len(waiting)
    return UNITS + (UNITS - number) * (MICROBATCHES - 1)


def gathers_of(reshard_after_forward: bool | int | None) -> dict[str, int]:
    """Gathers in forward and in backward, if units are freed after each backward."""
    again = 0 if reshard_after_forward is False else UNITS * MICROBATCHES
    return {"forward": UNITS * MICROBATCHES, "backward": again}


def train_and_count(rank: Rank, gathers: dict[str, int], reduces: dict[str, int], **options: Any) -> None:
    """Train three steps next to DDP, which reduces once, after the last microbatch, and count the collectives.

    Gradients are set to zeros and to None in turn, so that reductions also add to gradients that exist.
    """
    pair = tower(rank, microbatches=MICROBATCHES, **options)
    for _ in checked_steps(pair, microbatches(rank, 3), set_to_none="odd"):
        pair.check_counts("forward", all_gather=gathers["forward"])
        pair.check_counts("backward", all_gather=gathers["backward"], **reduces)
        pair.check_counts("step")


def microbatches(rank: Rank, steps: int) -> Iterator[Any]:
    """Microbatches that all differ."""
    return batches(rank, steps, (2, DIM), microbatches=MICROBATCHES)


@contract("ACCUMULATION-1", "ACCUMULATION-2", "ACCUMULATION-8")
@world(2, 4)
@COUNTED
@ROOT_TOO
@RESHARD_AND_OFFLOAD
@WAITING
def test_reduction_waits(rank: Rank, waiting: Any, reshard_after_forward: bool | int, offload: Any) -> None:
    """A unit whose reduction is deferred is reduced once, the others by every backward; the gathers do not change."""
    options: Any = {"reshard_after_forward": reshard_after_forward, "offload": offload}
    options["accumulation"] = Accumulation(units=waiting)
    train_and_count(rank, gathers_of(reshard_after_forward), {"reduce_scatter": reductions(waiting)}, **options)


@contract("ACCUMULATION-1", "ACCUMULATION-2", "ACCUMULATION-3", "ACCUMULATION-8")
@world(4)
@COUNTED
@ROOT_TOO
@needs(Capability.HYBRID)
@RESHARD_AND_OFFLOAD
@WAITING
@pytest.mark.parametrize("skips", ["reduction", pytest.param("all-reduce", marks=ALL_REDUCE)])
def test_hybrid_reduction_waits(
    rank: Rank, skips: Any, waiting: Any, reshard_after_forward: bool | int, offload: Any
) -> None:
    """Before the last microbatch a mesh with replicas reduces nothing, or only within each shard group."""
    options: Any = {"reshard_after_forward": reshard_after_forward, "offload": offload}
    how = Accumulation(units=waiting, skips=skips)
    train_and_count(rank, gathers_of(reshard_after_forward), reductions_of(how), **on_replicas(rank, how), **options)


def reductions_of(how: Accumulation) -> dict[str, int]:
    """The collectives of gradients of a step on replicas of two shards."""
    number = reductions(how.units)
    return {"reduce_scatter": UNITS * MICROBATCHES if how.skips == "all-reduce" else number, "all_reduce": number}


def on_replicas(rank: Rank, how: Accumulation | None) -> dict[str, Any]:
    """The options of accumulation on two replicas of two shards."""
    return {"mesh": rank.mesh((2, 2), ("replicate", "shard")), "accumulation": how}


@contract("ACCUMULATION-1", "ACCUMULATION-3")
@COUNTED
@needs(Capability.HYBRID, Capability.SINGLE_RANK)
@WAITING
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="reduction"),
        pytest.param({"skips": "all-reduce"}, marks=ALL_REDUCE, id="all-reduce"),
        pytest.param({"skips": "all-reduce", "ends_by_gradient_sync": True}, marks=ALL_REDUCE, id="ended-by-all"),
    ],
)
def test_reduction_over_replicas_waits(rank: Rank, how: dict[str, Any], waiting: Any) -> None:
    """Where replicas have one shard, the all-reduce is the only collective, and the only deferred one."""
    options: Any = {"mesh": rank.mesh((2, 1), ("replicate", "shard"))}
    options["accumulation"] = Accumulation(units=waiting, **how)
    train_and_count(rank, {"forward": 0, "backward": 0}, {"all_reduce": reductions(waiting)}, **options)


@contract("ACCUMULATION-1", "ACCUMULATION-2")
@world(2, 4)
@COUNTED
def test_root_keeps_its_own_while_waiting(rank: Rank) -> None:
    """By default only the root's own unit stays gathered between forward and backward."""
    gathers = {"forward": UNITS * MICROBATCHES, "backward": (UNITS - 1) * MICROBATCHES}
    train_and_count(rank, gathers, {"reduce_scatter": UNITS}, accumulation=Accumulation())


DEFERRED, HYBRID = needs(Capability.DEFERRED_REDUCTION), needs(Capability.HYBRID)
REDUCES = ["default", *(pytest.param(name, marks=DEFERRED) for name in ("every-backward", "first-and-last"))]


@contract("ACCUMULATION-1", "ACCUMULATION-6")
@world(4)
@pytest.mark.parametrize("reduces", REDUCES)
@pytest.mark.parametrize("has_replicas", [False, pytest.param(True, marks=HYBRID)], ids=["shards", "replicas"])
def test_microbatches_add_up(rank: Rank, has_replicas: bool, reduces: str) -> None:
    """Gradients of several microbatches add up, whether none, some or all backwards before the last reduce."""
    mesh = rank.mesh((2, 2), ("replicate", "shard")) if has_replicas else None
    how = None if reduces == "default" else Accumulation()
    pair = tower(rank, microbatches=MICROBATCHES, mesh=mesh, accumulation=how)
    if reduces != "default":
        last = iter([True, reduces == "every-backward", True] * 3)
        context = pair.adapter.microbatch
        rank.monkeypatch.setattr(pair.adapter, "microbatch", lambda *, is_last: context(is_last=next(last)))
    train_and_check(pair, microbatches(rank, 3), set_to_none="odd")


@contract("ACCUMULATION-10")
@needs(Capability.SHARDED, Capability.DEFERRED_REDUCTION)
def test_gradients_that_a_script_replaced(rank: Rank) -> None:
    """A reduction adds to the existing gradients, also if user code has replaced their tensors."""
    pair = tower(rank, microbatches=MICROBATCHES, accumulation=Accumulation())
    context = pair.adapter.microbatch

    def replace() -> None:
        for parameter in each_once(pair.adapter.named_parameters()).values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    rank.monkeypatch.setattr(pair.adapter, "microbatch", lambda *, is_last: context(is_last=True))
    after_microbatches(rank, pair, replace)
    train_and_check(pair, microbatches(rank, 3), set_to_none="odd")


@contract("ACCUMULATION-10")
@needs(Capability.OWN_OPTIMIZER, Capability.SHARDED)
def test_gradients_that_a_script_dropped_of_some(rank: Rank) -> None:
    """After user code has dropped the gradients of some parameters of each unit, later backwards add to all of them."""
    run, whole = run_and_plain(rank, models.Tower(dim=DIM))
    for number, batch in enumerate(batches(rank, 3, (4, DIM))):
        run.forward_backward((batch,), loss=models.mean_square)
        backward_of_copies(rank, whole, loss=models.mean_square(whole(batch)))
        if number == 0:
            held = run.adapter.held_parameters()
            # Where a unit has one flat parameter and no other, user code cannot drop a part of its gradient.
            for name in in_one_tensor_with({name for name in held if name.endswith("in_proj.weight")}, held):
                held[name].grad = whole.get_parameter(name).grad = None
    check_gradients(run, whole, step=0)


@contract("ACCUMULATION-11")
@needs(Capability.UNREDUCED_GRADIENTS, Capability.DEFERRED_REDUCTION)
@each_value("dropped", "when", "options")
@pytest.mark.parametrize(
    ("dropped", "when", "options"),
    [
        pytest.param("all", "before-backward", {}, id="all-before-backward"),
        pytest.param("all", "before-forward", {}, id="all-before-forward"),
        pytest.param("all", "before-forward", {"flat_parameters": True}, id="all-flat", marks=needs("flat_parameters")),
        pytest.param("all", "before-forward", {"reshard_after_forward": False}, id="all-kept", marks=KEPT_MARKS),
        pytest.param("layers.1.in_proj.weight", "before-forward", {}, id="one-before-forward"),
        pytest.param("all", "after-a-cast", {}, id="all-after-a-cast", marks=needs(Capability.CAST_AFTER_INIT)),
        pytest.param("all", "after-a-look", {}, id="all-after-a-look", marks=WHOLE),
        pytest.param("all", "after-a-failed-look", {}, id="all-after-a-failed-look", marks=WHOLE),
    ],
)
def test_gradients_that_a_script_drops(rank: Rank, dropped: str, when: str, options: dict[str, Any]) -> None:
    """Gradients that user code sets to None between two microbatches contribute nothing later, reduced or not.

    This holds between a forward and its backward, after a cast and back, and after user code has read full parameters,
    also if that read has raised, whether the gradients are dropped on sharded or on full parameters.
    """
    model = models.Tower(dim=DIM)

    def gradients(first: int, drop: str) -> dict[str, Any]:
        run = run_by_units(rank, models.copy_of(model), accumulation=Accumulation(), **options)
        for number in range(first, 3):
            with run.adapter.microbatch(is_last=number != 1):
                if when != "before-backward" and number == 2:
                    if when == "after-a-cast":
                        run.adapter.module.double().float()
                    elif when.endswith("look"):
                        look(run, fails="failed" in when)
                    drop_gradients(run, drop)
                loss = models.mean_square(run.adapter.forward(rank.batch(number, (2, DIM))))
                if when == "before-backward" and number == 2:
                    drop_gradients(run, drop)
                run.adapter.backward(loss)
        return run.adapter.gradients()

    found, last, everything = gradients(0, dropped), gradients(2, ""), gradients(0, "")
    # The same kernels on the same numbers, or on zeros and the same numbers.
    check_same_gradients(found, {name: (last if dropped in ("all", name) else everything)[name] for name in found})


@contract("ACCUMULATION-11")
@needs(Capability.UNREDUCED_GRADIENTS, Capability.DEFERRED_REDUCTION)
def test_gradients_that_are_not_reduced(rank: Rank) -> None:
    """Unreduced gradients on modules are full: the sums of this rank's own gradients over its microbatches."""
    run, whole = run_and_plain(rank, models.Tower(dim=DIM), accumulation=Accumulation())
    for batch in batches(rank, 2, (2, DIM)):
        with run.adapter.microbatch(is_last=False):
            run.forward_backward((batch,), loss=models.mean_square)
        models.mean_square(whole(batch)).backward()
    for name, parameter in run.adapter.named_parameters().items():
        expected = whole.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None, f"{name} shows no gradient"
        # The same kernels on the same numbers.
        check_bits(f"gradient of {name!r}", parameter.grad, expected)


@contract("ACCUMULATION-11")
@needs(Capability.UNREDUCED_GRADIENTS, Capability.DEFERRED_REDUCTION, Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=needs("flat_parameters"))])
@pytest.mark.parametrize("casts", [True, False])
def test_gradients_that_a_script_zeroes(rank: Rank, casts: bool, flat: bool) -> None:
    """Unreduced gradients that user code zeroes contribute nothing later, after a cast and back too."""
    model = models.Tower(dim=DIM)
    run, twin = two_runs(rank, model, accumulation=Accumulation(), flat_parameters=flat)
    with run.adapter.microbatch(is_last=False):
        run.forward_backward((rank.batch(0, (2, DIM)),), loss=models.mean_square)
    if casts:
        run.adapter.module.double().float()
    for parameter in each_once(run.adapter.named_parameters()).values():
        if parameter.grad is not None:
            parameter.grad.zero_()
    for one in (run, twin):
        one.forward_backward((rank.batch(1, (2, DIM)),), loss=models.mean_square)
    # The same kernels on the same numbers, or on zeros and the same numbers.
    check_same_gradients(run.adapter.gradients(), twin.adapter.gradients())


@contract("ACCUMULATION-11")
@needs(Capability.UNREDUCED_GRADIENTS, Capability.DEFERRED_REDUCTION)
@FLAT
@pytest.mark.parametrize("foreach", [False, True])
def test_reduced_and_unreduced_gradients_that_are_zeroed(rank: Rank, foreach: bool, flat: bool) -> None:
    """Zeroes, in place, that follow a reduced backward and an unreduced one leave nothing of either."""
    run, twin = two_runs(rank, models.Tower(dim=DIM), accumulation=Accumulation(), flat_parameters=flat)
    run.forward_backward((rank.batch(0, (2, DIM)),), loss=models.mean_square)
    with run.adapter.microbatch(is_last=False):
        run.forward_backward((rank.batch(1, (2, DIM)),), loss=models.mean_square)
    parameters = [one for one in each_once(run.adapter.named_parameters()).values() if one.grad is not None]
    torch.optim.SGD(parameters, foreach=foreach).zero_grad(set_to_none=False)
    for one in (run, twin):
        one.forward_backward((rank.batch(2, (2, DIM)),), loss=models.mean_square)
    # The same kernels on the same numbers, or on zeros and the same numbers.
    check_same_gradients(run.adapter.gradients(), twin.adapter.gradients())


@contract("ACCUMULATION-11")
@needs(Capability.UNREDUCED_GRADIENTS, Capability.DEFERRED_REDUCTION)
@FLAT
def test_unreduced_gradients_that_are_zero(rank: Rank, flat: bool) -> None:
    """An unreduced backward whose gradients are all zero takes nothing from those of a reduced one before it."""
    run, twin = two_runs(rank, models.Tower(dim=DIM), accumulation=Accumulation(), flat_parameters=flat)
    for microbatch in range(2):
        for one in (run, twin):
            one.forward_backward((rank.batch(microbatch, (2, DIM)),), loss=models.mean_square)
        with run.adapter.microbatch(is_last=False):
            run.forward_backward((rank.batch(2, (2, DIM)),), loss=lambda output: 0.0 * models.mean_square(output))
    for one in (run, twin):
        one.forward_backward((rank.batch(3, (2, DIM)),), loss=models.mean_square)
    # The same kernels on the same numbers, and on zeros.
    check_same_gradients(run.adapter.gradients(), twin.adapter.gradients())


def check_same_gradients(found: Mapping[str, Piece | None], expected: Mapping[str, Piece | None]) -> None:
    """Check that two runs have gradients of the same parameters, with the same bits."""
    for name, piece in found.items():
        other = expected[name]
        assert (piece is None) == (other is None), f"{name} has a gradient: {piece is not None}"
        if piece is not None and other is not None:
            check_bits(f"gradient of {name!r}", piece.tensor, other.tensor)


def look(run: Run, *, fails: bool) -> None:
    """Read full parameters and gradients, and optionally raise while they are full."""
    with (
        contextlib.suppress(LookupError),
        run.adapter.summon_full_params(FullParams(writeback=False, with_grads=True)),
    ):
        if fails:
            raise LookupError


def drop_gradients(run: Run, name: str) -> None:
    """Set the gradients of all registered parameters to None, of one of them, or ("") of none."""
    for shown, parameter in run.adapter.named_parameters().items():
        if name in ("all", shown):
            parameter.grad = None


@contract("ACCUMULATION-12")
@COUNTED
def test_contexts_nest(rank: Rank) -> None:
    """Entering and leaving a nested context that defers the reduction changes nothing."""
    pair = tower(rank, microbatches=MICROBATCHES, accumulation=Accumulation())
    context = pair.adapter.microbatch

    @contextlib.contextmanager
    def nested(*, is_last: bool) -> Iterator[None]:
        with context(is_last=is_last):
            if not is_last:
                with context(is_last=False):
                    pass
            yield

    rank.monkeypatch.setattr(pair.adapter, "microbatch", nested)
    for _ in checked_steps(pair, microbatches(rank, 2), set_to_none="odd"):
        pair.check_counts("backward", all_gather=DEPTH * MICROBATCHES, reduce_scatter=UNITS)


@contract("ACCUMULATION-3")
@world(1, 2)
@ALL_REDUCE
def test_deferred_all_reduce_without_replicas(rank: Rank) -> None:
    """Without replicas nothing is all-reduced, and deferring the all-reduce changes nothing."""
    model = models.Tower(dim=9)
    runs = [run_by_units(rank, models.copy_of(model), accumulation=how) for how in (None, ALL_REDUCE_ONCE)]
    for step in range(2):
        for run in runs:
            with run.adapter.microbatch(is_last=False):
                run.forward_backward((rank.batch(step, (4, 9)),), loss=models.mean_square)
        usual, deferred = (run.adapter.gradients() for run in runs)
        for name, piece in usual.items():
            found = deferred[name]
            assert piece is not None and found is not None, f"{name} has no gradient after {step_label(step)}"
            check_bits(f"gradient of {name!r}", found.tensor, piece.tensor, sides="deferred and not")


ALL_REDUCE_ONCE = Accumulation(skips="all-reduce")
#: How the gradients of microbatches are combined, on a mesh of one dimension and on replicas.
COMBINED = pytest.mark.parametrize(
    ("replicas", "how"),
    [
        pytest.param(1, None, id="default"),
        pytest.param(1, Accumulation(), marks=DEFERRED, id="deferred"),
        pytest.param(2, None, marks=HYBRID, id="replicas"),
        pytest.param(2, Accumulation(), marks=[HYBRID, DEFERRED], id="replicas-deferred"),
        pytest.param(2, ALL_REDUCE_ONCE, marks=[HYBRID, ALL_REDUCE], id="replicas-deferred-all-reduce"),
    ],
)


@contract("ACCUMULATION-7")
@world(4)
@needs(Capability.UNUSED_MODULE)
@COMBINED
@pytest.mark.parametrize("own_units", [False, True], ids=["one-unit", "own-units"])
def test_part_used_by_one_microbatch(rank: Rank, own_units: bool, replicas: int, how: Accumulation | None) -> None:
    """A parameter that only the first, the second or the last microbatch uses has that microbatch's gradient."""
    check_part_used(rank, how, own_units, mesh=rank.mesh((2, 2), ("replicate", "shard")) if replicas > 1 else None)


@contract("ACCUMULATION-7")
@needs(Capability.UNUSED_MODULE, Capability.HYBRID, Capability.SINGLE_RANK, "accumulation.skips")
@pytest.mark.parametrize("own_units", [False, True], ids=["one-unit", "own-units"])
def test_part_used_by_one_microbatch_of_replicas(rank: Rank, own_units: bool) -> None:
    """On replicas of one shard, a parameter of one microbatch has its gradient, all-reduced after the last one."""
    check_part_used(rank, ALL_REDUCE_ONCE, own_units, mesh=rank.mesh((2, 1), ("replicate", "shard")))


def check_part_used(rank: Rank, how: Accumulation | None, own_units: bool, *, mesh: DeviceMesh | None) -> None:
    """Train branches, a different one in each microbatch."""
    model = models.Branches(DIM, MICROBATCHES, alike=not own_units)  # of one size, parts of a unit can be confused
    options: Any = {"baseline": "replicated", "microbatches": MICROBATCHES, "find_unused_parameters": True}
    pair = rank.pair(model, units=model.units() if own_units else [], mesh=mesh, accumulation=how, **options)
    for step in range(3):
        batches = [rank.batch(step, (2, DIM), microbatch=number) for number in range(MICROBATCHES)]
        used = [(step + number) % MICROBATCHES for number in range(MICROBATCHES)]
        pair.checked_step(list(zip(batches, used, strict=True)), set_to_none=step % 2 == 1)


KEPT = pytest.mark.parametrize("waiting", ["all", pytest.param("root-only", marks=PER_UNIT)])


def kept_gathers(waiting: str) -> dict[str, int]:
    """Gathers by phase: units that stay gathered after backward are gathered in the first microbatch only."""
    return {"forward": UNITS if waiting == "all" else UNITS + (UNITS - 1) * (MICROBATCHES - 1), "backward": 0}


@contract("ACCUMULATION-1", "ACCUMULATION-2", "ACCUMULATION-4")
@world(2, 4)
@COUNTED
@needs(Capability.RESHARD_AFTER_FORWARD, "accumulation.reshard_after_backward")
@KEPT
def test_parameters_stay_gathered(rank: Rank, waiting: Any) -> None:
    """Units that neither reduce nor free before the last microbatch are gathered once in a step."""
    options: Any = {
        "reshard_after_forward": False,
        "accumulation": Accumulation(units=waiting, reshard_after_backward=False),
    }
    train_and_count(rank, kept_gathers(waiting), {"reduce_scatter": reductions(waiting)}, **options)


@contract("ACCUMULATION-1", "ACCUMULATION-2", "ACCUMULATION-3", "ACCUMULATION-4")
@world(4)
@COUNTED
@needs(Capability.HYBRID, Capability.RESHARD_AFTER_FORWARD, "accumulation.reshard_after_backward")
@KEPT
@pytest.mark.parametrize("skips", ["reduction", pytest.param("all-reduce", marks=ALL_REDUCE)])
def test_hybrid_parameters_stay_gathered(rank: Rank, skips: Any, waiting: Any) -> None:
    """On replicas, units not freed before the last microbatch are gathered once a step, reduced earlier or not."""
    how = Accumulation(units=waiting, skips=skips, reshard_after_backward=False)
    options = {"reshard_after_forward": False, **on_replicas(rank, how)}
    train_and_count(rank, kept_gathers(waiting), reductions_of(how), **options)


@contract("ACCUMULATION-5")
@world(2, 4)
@COUNTED
@needs(Capability.RESHARD_AFTER_FORWARD, "accumulation.set_is_last_backward")
@pytest.mark.parametrize(
    "keeps_unsharded", [False, pytest.param(True, marks=needs("accumulation.reshard_after_backward"))]
)
@pytest.mark.parametrize("unshards", [False, pytest.param(True, marks=needs(Capability.ASYNC_UNSHARD))])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_forwards_run_ahead(rank: Rank, ahead: int, unshards: bool, keeps_unsharded: bool) -> None:
    """Forwards may run ahead of backwards, as in a pipeline; the backward marked as the last reduces.

    If a call has gathered the parameters before the first forward, that forward gathers nothing.
    """
    how = Accumulation(reshard_after_backward=not keeps_unsharded, set_is_last_backward=True)
    pair = tower(rank, microbatches=MICROBATCHES, baseline="replicated", reshard_after_forward=False, accumulation=how)
    for step, batch in enumerate(microbatches(rank, 3)):
        if unshards:
            with pair.sharded.recorder.during("unshard"):
                pair.adapter.unshard()
        pair.checked_step(batch, set_to_none=step % 2 == 1, ahead=ahead)
        # The next forward gathers the units that a backward freed, or at the end of the pipeline the next backward.
        forwards, backwards = (1, 0) if keeps_unsharded else (MICROBATCHES - ahead, ahead)
        pair.check_counts("forward", all_gather=UNITS * (forwards - unshards))
        pair.check_counts("backward", all_gather=UNITS * backwards, reduce_scatter=UNITS)
        assert pair.sharded.trace.counts("unshard") == ({"all_gather": UNITS * (step + 1)} if unshards else {})


@contract("ACCUMULATION-9")
@needs("accumulation.set_is_last_backward", "accumulation.units", Capability.COUNTED_UNITS, Capability.ALL_GATHER_ORDER)
@needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("ahead", [1, 2])
def test_backwards_before_the_last_keep_the_order(rank: Rank, ahead: int) -> None:
    """A backward marked as not the last keeps the recorded order of forwards, by which later ones gather ahead."""
    how = Accumulation(units=(), set_is_last_backward=True)
    pair = tower(rank, microbatches=MICROBATCHES, baseline="replicated", reshard_after_forward=True, accumulation=how)
    for _ in checked_steps(pair, microbatches(rank, 2), set_to_none="odd", ahead=ahead):
        backward = [(item.kind, item.unit) for item in pair.last_trace() if item.phase == "backward"]
        size = 2 * UNITS
        parts = [backward[start : start + size] for start in range(0, len(backward), size)]
        assert len(parts) == MICROBATCHES, f"{len(backward)} collectives in {MICROBATCHES} backwards: {backward}"
        for number, part in enumerate(parts):
            assert part == parts[0], f"backward {number} does not follow the order of the forwards, as backward 0 did"


@contract("ACCUMULATION-5")
@needs("accumulation.set_is_last_backward", Capability.TIED_PARAMETERS)
def test_tied_forwards_run_ahead(rank: Rank) -> None:
    """A backward marked as not the last keeps the recorded order of forwards, also in a model with a tied embedding."""
    config = models.TransformerConfig(is_tied=True)
    has = rank.implementation.capabilities()
    for unshards, keeps_unsharded in itertools.product((False, True), (False, True)):
        if (unshards and Capability.ASYNC_UNSHARD not in has) or (
            keeps_unsharded and "accumulation.reshard_after_backward" not in has
        ):
            continue
        how = Accumulation(reshard_after_backward=not keeps_unsharded, set_is_last_backward=True)
        options: Any = {"microbatches": MICROBATCHES, "accumulation": how}
        pair = pair_by_units(rank, models.Transformer(config), baseline="replicated", **options)
        drawn = tokens(rank, 3, (2, config.length), vocabulary=config.vocabulary, microbatches=MICROBATCHES)
        for step, batch in enumerate(drawn):
            if unshards:
                pair.adapter.unshard()
            pair.step(batch, set_to_none=step % 2 == 1, ahead=1)
        pair.check()


BY_HAND = needs(Capability.MANUAL_BACKWARD_FINALIZATION)
ENDED = ["reduced", "deferred", pytest.param("replicas", marks=HYBRID), "kept"]


@contract("ACCUMULATION-14")
@world(2, 4)
@BY_HAND
@COUNTED
@needs(Capability.RESHARD_AFTER_FORWARD, "accumulation.reshard_after_backward", Capability.SINGLE_RANK)
@needs(Capability.REGISTERED_STATE)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ended", ENDED)
def test_finalized_backward(rank: Rank, ended: str, async_op: bool) -> None:
    """After ``finalize_backward`` gradients are those of backwards that end by themselves: what is left is reduced."""
    has_replicas, keeps = ended == "replicas", ended in ("reduced", "kept")
    mesh = rank.mesh((2, rank.world_size // 2), ("replicate", "shard")) if has_replicas else rank.mesh()
    pair = tower(rank, microbatches=MICROBATCHES, reshard_after_forward=False, mesh=mesh)
    root: Any = pair.adapter.module
    root.set_manual_backward_finalization(True)

    @contextlib.contextmanager
    def finalized(*, is_last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(ended == "reduced")
        root.set_reshard_after_backward(not keeps)
        yield
        if is_last:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            with pair.sharded.recorder.during("finalization"):
                handle = root.finalize_backward(async_op=async_op)
            assert (handle is not None) == async_op, f"finalize_backward(async_op={async_op}) returned {handle}"
            for _ in range(2 * async_op):
                handle.wait()
            left = [name for name, gathered in pair.adapter.gathered().items() if gathered]
            assert not left, f"still gathered after finalize_backward: {left}"

    rank.monkeypatch.setattr(pair.adapter, "microbatch", finalized)
    shards = mesh.size() > 2 or not has_replicas
    for _ in checked_steps(pair, microbatches(rank, 3), set_to_none="odd"):
        pair.check_counts("forward", all_gather=UNITS * (1 if keeps else MICROBATCHES) * shards)
        if ended != "reduced":
            pair.check_counts("backward")
            pair.check_counts("finalization", reduce_scatter=UNITS * shards, all_reduce=UNITS * has_replicas)


@contract("ACCUMULATION-14")
@BY_HAND
@needs(Capability.HYBRID, Capability.SINGLE_RANK, "accumulation.skips", Capability.UNUSED_MODULE)
@pytest.mark.parametrize("last", ["another-path", "none"])
def test_finalization_sums_over_replicas(rank: Rank, last: str) -> None:
    """``finalize_backward`` sums over replicas what earlier backwards reduced, of a unit that the last one left out.

    So it does where no backward follows the one that did not sum.
    """
    model = models.Branches(DIM, 2, alike=False)
    options: Any = {"baseline": "replicated", "microbatches": 2, "find_unused_parameters": True}
    mesh = rank.mesh((2, 1), ("replicate", "shard"))
    pair = rank.pair(model, units=model.units(), mesh=mesh, **options)
    root: Any = pair.adapter.module
    root.set_manual_backward_finalization(True)

    @contextlib.contextmanager
    def finalized(*, is_last: bool) -> Iterator[None]:
        root.set_requires_all_reduce(is_last and last == "another-path")
        yield
        if is_last:
            root.set_requires_all_reduce(True)
            root.finalize_backward()

    rank.monkeypatch.setattr(pair.adapter, "microbatch", finalized)
    for step in range(2):
        parts = [rank.batch(step, (2, DIM), microbatch=number) for number in range(2)]
        pair.checked_step(list(zip(parts, (0, 1), strict=True)))


@contract("ACCUMULATION-14")
@BY_HAND
@needs(Capability.RECOVERY, Capability.HYBRID, Capability.SINGLE_RANK, "accumulation.skips")
def test_finalization_refused(rank: Rank) -> None:
    """What is out of place around ``finalize_backward`` is refused by name, and afterwards the training goes on."""
    pair = tower(rank, mesh=rank.mesh((2, 1), ("replicate", "shard")))
    root: Any = pair.adapter.module
    batch = rank.batch(9, (2, DIM))

    def refuses(what: str, attempt: Any, *words: str) -> None:
        refusal = Refusal(rank, attempt)
        assert refusal.text is not None, f"not refused: {what}"
        refusal.check_names(*words)

    def backward() -> None:
        output = pair.adapter.forward(batch)
        within = "finalize_backward within backward", root.finalize_backward, "after backward"
        output.register_hook(lambda _: refuses(*within))
        pair.adapter.backward(models.mean_square(output))

    @contextlib.contextmanager
    def finalized(*, is_last: bool) -> Iterator[None]:
        yield
        mode = "set_manual_backward_finalization"
        refuses("another mode before the end", lambda: root.set_manual_backward_finalization(False), mode)
        handle = root.finalize_backward(async_op=True)
        refuses("a forward before wait()", lambda: root(batch), "waited on")
        refuses("a second end before wait()", root.finalize_backward, "waited on")
        handle.wait()

    other: Any = run_by_units(rank, models.Tower(dim=DIM)).adapter.module
    other.layers[1].set_manual_backward_finalization(True)
    refuses("the first forward of a root, a part of which has a mode", lambda: other(batch), "root")
    assert root.finalize_backward() is None
    root.finalize_backward(async_op=True).wait()  # nothing has run, and there is nothing to do
    train_and_check(pair, batches(rank, 1, (2, DIM)))
    refuses("finalize_backward unasked for", root.finalize_backward, "set_manual_backward_finalization")
    root.set_manual_backward_finalization(True)
    refuses("finalize_backward of a part", root.layers[1].finalize_backward, "root")
    refuses("another mode of a part", lambda: root.layers[1].set_manual_backward_finalization(False), "root")
    for is_reduced in (True, False):
        root.set_requires_gradient_sync(is_reduced)
        root.set_requires_all_reduce(False)
        backward()
        root.set_requires_gradient_sync(True)
        root.set_requires_all_reduce(False)
        refuses("an end without all-reduce", root.finalize_backward, "partial", "set_requires_all_reduce")
        pair.adapter.recover()
        root.finalize_backward()  # which has nothing to reduce any more
    root.set_requires_all_reduce(True)
    backward()
    handle = root.finalize_backward(async_op=True)
    pair.adapter.recover()
    refuses("to wait for what a reset dropped", handle.wait, "handle")
    pair.adapter.zero_grad(set_to_none=True)
    rank.monkeypatch.setattr(pair.adapter, "microbatch", finalized)
    train_and_check(pair, batches(rank, 2, (2, DIM)))


SHARED = needs(Capability.SHARE_COMM_CTX)


@contract("ACCUMULATION-13")
@world(4)
@needs(Capability.AUTOGRAD_CALLS, Capability.OWN_OPTIMIZER)
@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        *(pytest.param(name, False, id=name) for name in DEPTHS),
        pytest.param("Interleaved1F1B", True, marks=SHARED, id="shared-context"),
    ],
)
@pytest.mark.parametrize("calls", ["one", "two", pytest.param("two-deferred", marks=BY_HAND)])
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_schedules_of_a_pipeline(
    rank: Rank, reshard_after_forward: bool | None, calls: str, schedule: str, shares: bool
) -> None:
    """Pipeline stages, each sharded by itself, train under torch's schedules as one model does, in one or two calls.

    The gradients of two calls in a step add up, whether each call reduces them or only the last one.
    """
    train_stages(rank, schedule=schedule, calls=calls, shares=shares, reshard_after_forward=reshard_after_forward)
