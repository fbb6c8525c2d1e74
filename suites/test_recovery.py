"""Chapter RECOVERY: after something went wrong."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardproof.testing import Capability, Pair, Rank, Run, contract, meaningful_from, models, needs, states, world
from shardproof.testing.axes import FLAT, RESHARD, SHARDS, subjects
from shardproof.testing.casts import check_equal, run_and_replica
from shardproof.testing.compare import Undivided, check_bits, each_once
from shardproof.testing.make import (
    Accumulation,
    FullParams,
    Precision,
    run_and_plain,
    run_by_units,
    tower,
    two_runs,
)
from shardproof.testing.measure import Census, Collective
from shardproof.testing.other_worlds import other_worlds
from shardproof.testing.train import Loss, Means, check_twins, mixed, optim, recompute

pytestmark = world(2)

DIM = 9
DEPTH = 5
#: In the second of the units.
PLACE = "layers.2.out_proj"

RECOVERS = needs(Capability.RECOVERY)


class Injected(Exception):
    """The error that is injected on all ranks."""


class Interrupted(BaseException):
    """An interrupt of user code on all ranks, as by Ctrl-C in a notebook: not an ``Exception``."""


@dataclasses.dataclass
class Trap:
    """Raises ``error`` where a module of a run computes next in a phase: "forward", "backward", or "" for none."""

    phase: str = ""
    error: type[BaseException] = Injected

    def lay(self, run: Run, place: str) -> None:
        """Watch a module, by its name in the original model."""
        run.original_module(place).register_forward_pre_hook(lambda module, args: self._meet("forward"))
        run.original_module(place).register_forward_hook(self._watch)

    def _watch(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._meet("backward"))

    def _meet(self, phase: str) -> None:
        if self.phase == phase:
            self.phase = ""
            raise self.error(phase)


@contract("RECOVERY-1")
@world(2, 4)
@RECOVERS
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@subjects("phase", ["forward", "backward", "evaluation"])
def test_exception(rank: Rank, phase: str, reshard_after_forward: bool | int | None) -> None:
    """After an exception in the first or a later forward or backward, in the second of four units, training goes on."""
    check_recovery(rank, phase, reshard_after_forward=reshard_after_forward)


@contract("RECOVERY-1")
@RECOVERS
def test_recovery_before_the_first_forward(rank: Rank) -> None:
    """User code that recovers from an error before the model has run at all, as in its data loading, trains on."""
    pair = tower(rank, dim=DIM)
    for step in range(2):
        pair.adapter.recover()
        pair.checked_step(rank.batch(step, (4, DIM)))


@contract("RECOVERY-4")
@RECOVERS
@FLAT
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("phase", ["forward", "evaluation"])
@subjects("writes", ["step", "fused-step", "user-code"])
def test_values_written_after_a_forward_that_raised(
    rank: Rank, writes: str, phase: str, reshard_after_forward: bool | int | None, flat: bool
) -> None:
    """A forward after one that raised sees the optimizer's step since, without a recovery call, or is refused."""
    model = models.Tower(dim=DIM, depth=DEPTH)
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, "flat_parameters": flat}
    if writes != "user-code":
        options["optimizer"] = functools.partial(torch.optim.AdamW, lr=0.5, fused=writes == "fused-step")
    sound, run = two_runs(rank, model, **options)
    trap = Trap()
    trap.lay(run, PLACE)
    for one in (sound, run):
        one.forward_backward((rank.batch(0, (4, DIM)),), loss=models.mean_square)
    trap.phase = "forward"
    with pytest.raises(Injected), run.recorder.during("failed"), torch.set_grad_enabled(phase == "forward"):
        run.adapter.forward(rank.batch(1, (4, DIM)))
    for one in (sound, run):
        if writes == "user-code":
            with torch.no_grad():
                for parameter in each_once(one.adapter.held_parameters()).values():
                    parameter.mul_(0.5)
        else:
            one.adapter.step()
    batch = (rank.batch(2, (4, DIM)),)
    refused, found = None, None
    try:
        found = run.evaluate(batch)[0]
    except Exception as error:
        refused = type(error).__name__
    everyone = rank.exchange(refused)
    assert len(set(everyone)) == 1, f"ranks refuse the forward by {everyone}"
    if found is not None:
        why = "the forward after one that raised uses other values than the last ones written"
        check_bits(why, found, sound.evaluate(batch)[0])


@contract("RECOVERY-3")
@RECOVERS
@pytest.mark.parametrize("phase", ["forward", "backward", "evaluation"])
def test_interrupt(rank: Rank, phase: str) -> None:
    """User code that recovers from an interrupt, which ``except Exception`` does not catch, trains on."""
    check_recovery(rank, phase, error=Interrupted)


@contract("RECOVERY-1")
@RECOVERS
@needs(Capability.GROUPED_UNIT)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_exception_in_a_unit_of_several_modules(rank: Rank, phase: str) -> None:
    """A model recovers from an exception in a unit of which some modules have run, and others have not."""
    check_recovery(rank, phase, units=[["layers.1", "layers.2", "layers.3"], ["layers.4"]])


@contract("RECOVERY-1")
@RECOVERS
@needs(Capability.UNUSED_MODULE)
@pytest.mark.parametrize(
    ("units", "path"),
    [
        ([["branches.0"], ["branches.1"], ["branches.2"]], (2,)),
        pytest.param([["branches.0", "branches.1"], ["branches.2"]], (1, 0, 2), marks=needs(Capability.GROUPED_UNIT)),
    ],
    ids=["another-unit", "another-order"],
)
def test_exception_before_another_path(rank: Rank, units: list[list[str]], path: tuple[int, ...]) -> None:
    """A model recovers if the next forward runs other units than the one that raised, or in another order."""
    options: dict[str, Any] = {"units": units, "find_unused_parameters": True, "reshard_after_forward": None}
    run, sound = (rank.run(models.Branches(dim=DIM), **options) for _ in range(2))
    trap = Trap()
    trap.lay(run, "branches.1.out_proj")
    for step in range(2):
        batch = (rank.batch(step, (4, DIM)), path)
        trap.phase = "forward"
        with pytest.raises(Injected), run.recorder.during("failed"):
            run.adapter.forward(batch[0], (0, 1))
        run.adapter.recover()
        traces = []
        for one in (run, sound):
            before = len(one.trace)
            one.step([batch], loss=models.mean_square)
            traces.append(one.trace[before:])
        assert_same(f"step {step}, after a forward of other modules that raised", *traces)


@contract("RECOVERY-1")
@RECOVERS
@needs(Capability.RECOMPUTATION)
@pytest.mark.parametrize("means", ["hooks", "call", "reentrant-call"])
def test_exception_in_a_recomputation(rank: Rank, means: Means) -> None:
    """A model recovers from an exception while backward computes a unit again."""
    model = models.NormedStack(dim=DIM)
    units = [["norm"], *model.units()]
    check_recovery(rank, "recomputation", model, units=units, prepare=lambda plain: recompute(plain, means))


@contract("RECOVERY-1")
@world(4)
@RECOVERS
@needs(Capability.DEFERRED_REDUCTION)
@pytest.mark.parametrize(
    ("replicas", "skips"),
    [
        (1, "reduction"),
        pytest.param(2, "reduction", marks=needs(Capability.HYBRID)),
        pytest.param(2, "all-reduce", marks=needs(Capability.HYBRID, "accumulation.skips")),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("defers", [False, True], ids=["last", "deferred"])
def test_exception_in_a_later_microbatch(rank: Rank, defers: bool, phase: str, replicas: int, skips: Any) -> None:
    """Recovery drops the gradients of earlier microbatches, reduced or not, and ends the deferral of the failed one."""
    mesh = rank.mesh((replicas, 4 // replicas), ("replicate", "shard")) if replicas > 1 else None
    options: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "accumulation": Accumulation(skips=skips)}
    check_recovery(rank, phase, defers=defers, **options)


@contract("RECOVERY-1")
@RECOVERS
@needs("precision.param_dtype", "precision.reduce_dtype")
@needs(Capability.DEFERRED_REDUCTION, Capability.ACCUMULATION_DTYPES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_exception_while_gradients_add_up_in_another_dtype(rank: Rank, phase: str) -> None:
    """Recovery drops gradients of earlier microbatches that have accumulated in the reduce dtype."""
    precision = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run, replica = run_and_replica(
        rank, mixed.Mixed(), units=[["low"], ["high"]], optimizer=optim.sgd(), precision=precision, microbatches=2,
        accumulation=Accumulation(),
    )  # fmt: skip
    trap = Trap()
    trap.lay(run, "low")
    for step in range(2):
        attempt(run, trap, phase, [rank.batch(step, (6, 4), microbatch=number) for number in (2, 3)], loss=torch.sum)
        batch = [(rank.batch(step, (6, 4), microbatch=number),) for number in range(2)]
        expected = replica.step(batch, loss=torch.sum)
        check_equal(rank, run, run.step(batch, loss=torch.sum), expected, number=step)


@contract("RECOVERY-2")
@world(2, 4)
@needs(Capability.DISTRIBUTED_CHECKPOINT)
@pytest.mark.parametrize(
    "fewer", [pytest.param(1, marks=needs(Capability.SINGLE_RANK)), pytest.param(2, marks=meaningful_from(4))]
)
@pytest.mark.parametrize(
    ("reshard_after_forward", "default_mesh"),
    [
        *(pytest.param(*item.values, False, marks=item.marks, id=str(item.values[0])) for item in RESHARD),
        pytest.param(None, True, marks=needs("default_mesh"), id="all-ranks-by-default"),
    ],
)
def test_process_groups_made_anew(
    rank: Rank, reshard_after_forward: bool | int | None, default_mesh: bool, fewer: int
) -> None:
    """Ranks that destroy their process groups and make others train on from a checkpoint with the same losses.

    First there are fewer ranks in a world, then as many as before; the batch of all of them stays the same.
    """
    model = models.Tower(dim=DIM).to(rank.device)
    undivided = Undivided(model, optimizer=optim.sgd())
    with other_worlds(rank) as worlds:
        for number, size in enumerate((rank.world_size, fewer, rank.world_size)):
            # A single rank has no two ranks, and of two ranks, two are all.
            leaves = True if reshard_after_forward == 2 and size <= 2 else reshard_after_forward
            with worlds.of(size) as member:
                torch.manual_seed(rank.seeds.init + number)
                options: dict[str, Any] = {"reshard_after_forward": leaves, "default_mesh": default_mesh}
                run = run_by_units(member, models.Tower(dim=DIM), optimizer=optim.sgd(), **options)
                if number:
                    # Other values and states, all of which the checkpoint has to replace.
                    run.step([(parts_of(member, 7)[member.index],)], loss=models.mean_square)
                    states.load(run, rank.tmp_path / f"{number - 1}-0")
                for step in (2 * number, 2 * number + 1):
                    parts = parts_of(member, step)
                    picture = run.step([(parts[member.index],)], loss=models.mean_square)
                    undivided.check(rank, member, run, picture, parts)
                states.save(run, rank.tmp_path / f"{number}-{rank.index // size}")


def parts_of(member: Rank, step: int) -> list[torch.Tensor]:
    """The batch of each rank, parts of one batch that is the same in a world of any size."""
    whole = torch.randn((12, DIM), generator=torch.Generator().manual_seed(member.seeds.data + step))
    return list(whole.to(member.device).chunk(member.world_size))


@contract("RECOVERY-3")
@RECOVERS
@needs(Capability.UNUSED_MODULE)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_exception_that_the_model_catches(rank: Rank, reshard_after_forward: bool | None) -> None:
    """A model that catches the error of a unit within its forward, and goes on with another, trains as unsharded."""
    model = Careful(DIM)
    units = [["branches.0"], ["branches.1"]]
    options: dict[str, Any] = {
        "units": units,
        "reshard_after_forward": reshard_after_forward,
        "find_unused_parameters": True,
    }
    pair = rank.pair(model, **options)
    for step in range(4):
        pair.step((rank.batch(step, (4, DIM)), step % 2 == 0))
        pair.adapter.recover()
        pair.check()


@contract("RECOVERY-3")
@RECOVERS
@needs(Capability.UNUSED_MODULE, Capability.SHARDED, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "train"])
def test_units_that_raised_are_sharded(rank: Rank, mode: Any) -> None:
    """After a forward in which the model catches the error of a unit, none of its units but the root is gathered."""
    run = rank.run(
        Careful(DIM), units=[["branches.0"], ["branches.1"]], reshard_after_forward=True, find_unused_parameters=True
    )
    census = Census(run)
    batch = (rank.batch(0, (4, DIM)), True)
    for _ in range(2):
        if mode == "train":
            run.forward_backward(batch, loss=models.mean_square)
        else:
            run.evaluate(batch, mode=mode)
        run.adapter.recover()
        gathered = {unit: nbytes for unit, nbytes in census.held().items() if unit.startswith("branches")}
        assert not gathered, f"after the forward units are gathered (bytes): {gathered}"


@contract("RECOVERY-3")
@RECOVERS
@needs(Capability.DISTRIBUTED_CHECKPOINT, Capability.FULL_STATE_DICT)
@subjects("phase", ["forward", "backward"])
def test_saving_after_an_exception(rank: Rank, phase: str) -> None:
    """State dicts and full parameters that user code reads after a failed pass have the values of the last step."""
    run, plain = failed(rank, phase)
    saved = run.adapter.checkpoint(form="full")["model"]
    wrong = [name for name, value in plain.state_dict().items() if not torch.equal(saved[name], value)]
    assert not wrong, f"saved after an exception with other values: {', '.join(wrong)}"
    if Capability.SUMMON_FULL_PARAMS in run.adapter.capabilities():
        with run.adapter.summon_full_params(FullParams()) as found:
            states.check_whole(rank, FullParams(), found, plain)


@contract("RECOVERY-3")
@RECOVERS
@needs(Capability.SUMMON_FULL_PARAMS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_function_for_every_module_after_an_exception(rank: Rank, phase: str) -> None:
    """A function that user code applies to every module after a failed pass sees the values that the last step left."""
    run, plain = failed(rank, phase)
    for one in (run.adapter.module, plain):
        one.apply(lambda module: states.write(dict(module.named_parameters(recurse=False))))
    states.check_values(run, plain)


@contract("RECOVERY-3")
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
@SHARDS
def test_exception_with_full_parameters(rank: Rank, shards: bool, flat: bool) -> None:
    """If user code fails while parameters are full, they are sharded again, with the values that it has written."""
    model = models.Tower(dim=DIM, depth=DEPTH)
    options: dict[str, Any] = {"flat_parameters": flat, "shards": shards, "optimizer": optim.sgd()}
    run, plain = run_and_plain(rank, model, **options)
    for _ in range(2):
        with pytest.raises(Injected), run.adapter.summon_full_params(FullParams()) as found:
            states.write(found)
            raise Injected("whole")
        states.write(dict(plain.named_parameters()))
        states.check_values(run, plain)
    twin = run_by_units(rank, plain, **options)
    check_twins(rank, (run, twin), (rank.batch(step, (4, DIM)) for step in range(2)), why="the same values")


@contract("RECOVERY-3")
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
@SHARDS
def test_shards_after_a_refused_full_parameter(rank: Rank, shards: bool, flat: bool) -> None:
    """If user code replaces a full parameter by one of another shape, the old shards are restored, and train."""

    def replace(run: Run) -> None:
        with run.adapter.summon_full_params(FullParams()):
            layer = run.original_module("layers.1.in_proj")
            layer.weight = torch.nn.Parameter(torch.zeros(2, 2, device=rank.device))

    check_refused_changes(rank, 2, replace, "shape", "refusal", flat_parameters=flat, shards=shards)


@contract("RECOVERY-3")
@needs(Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=needs("flat_parameters"))])
def test_cast_that_raises(rank: Rank, flat: bool) -> None:
    """A cast that fails changes nothing: the model trains on, and has the parameters that it had."""
    options: dict[str, Any] = {"flat_parameters": True} if flat else {}
    check_refused_changes(
        rank, 3, lambda run: run.adapter.module.type("torch.NoSuchTensor"), "NoSuchTensor", "failed cast", **options
    )


def failed(rank: Rank, phase: str) -> tuple[Run, torch.nn.Module]:
    """A run after an exception in its first pass, and a plain copy of its model (collective)."""
    run, plain = run_and_plain(rank, models.Tower(dim=DIM, depth=DEPTH), optimizer=None)
    trap = Trap()
    trap.lay(run, PLACE)
    attempt(run, trap, phase, [rank.batch(0, (4, DIM))])
    return run, plain


def check_refused_changes(
    rank: Rank, steps: int, change: Callable[[Run], object], match: str, what: str, **options: Any
) -> None:
    """Change a run before each step, which raises and must leave no trace: it trains the bits of another run."""
    model = models.Tower(dim=DIM, depth=DEPTH)
    run, twin = two_runs(rank, model, optimizer=optim.sgd(), **options)
    for step in range(steps):
        names = [name for name, _ in run.adapter.module.named_parameters()]
        with pytest.raises(Exception, match=match):
            change(run)
        left = [name for name, _ in run.adapter.module.named_parameters()]
        assert left == names, f"after the {what} the parameters are {left} instead of {names}"
        check_twins(rank, (run, twin), [rank.batch(step, (4, DIM))], why="the same values", first=step)


class Careful(torch.nn.Module):
    """Tries one branch, which may raise, and runs another branch instead if it does; between layers of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)
        self.branches = torch.nn.ModuleList([Failing(dim), Failing(dim)])

    def forward(self, batch: torch.Tensor, fails: bool) -> torch.Tensor:
        hidden = torch.tanh(self.enter(batch))
        try:
            hidden = self.branches[0](hidden, fails)
        except Injected:
            hidden = self.branches[1](hidden, False)
        output: torch.Tensor = self.leave(hidden)
        return output


class Failing(torch.nn.Module):
    """Raises after it has computed, if configured to."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(dim, dim)

    def forward(self, hidden: torch.Tensor, fails: bool) -> torch.Tensor:
        output = torch.tanh(self.layer(hidden))
        if fails:
            raise Injected("a branch")
        return output


def check_recovery(
    rank: Rank,
    phase: str,
    model: Any = None,
    *,
    error: type[BaseException] = Injected,
    defers: bool = False,
    **options: Any,
) -> None:
    """Train steps that each follow an attempt that raises, the first of all and then two; then evaluate.

    Each step issues the collectives of a run without failures. With ``defers`` the failing microbatch is not the last
    one of its step.
    """
    model = model or models.Tower(dim=DIM, depth=DEPTH)
    options = {"units": model.units()} | options
    sound, pair = rank.run(models.copy_of(model), **options), rank.pair(model, **options)
    trap, census = Trap(error=error), Census(pair.sharded)
    trap.lay(pair.sharded, PLACE)
    for step in range(3):
        for number in range(1 + (step == 1)):
            attempt(pair.sharded, trap, phase, batches(rank, pair, step, shift=10 * (1 + number)), defers=defers)
            assert_nothing_gathered(pair, census, f"after the exception in {phase} before step {step}")
        batch = batches(rank, pair, step)
        pair.step(batch)
        assert_nothing_gathered(pair, census, f"after step {step}, which followed an exception in {phase}")
        pair.check()
        before = len(sound.trace)
        sound.step([(one,) for one in batch], loss=models.mean_square)
        assert_same(f"step {step}, after an exception in {phase}", pair.last_trace(), sound.trace[before:])
    attempt(pair.sharded, trap, phase, batches(rank, pair, 3, shift=10))
    pair.evaluate(rank.batch(3, (4, DIM)))
    pair.check()


def assert_same(what: str, found: Sequence[Collective], expected: Sequence[Collective]) -> None:
    """Check that a step has issued the same collectives as the step of a run without failures."""
    for number, (one, other) in enumerate(itertools.zip_longest(map(str, found), map(str, expected))):
        assert one == other, f"{what}: collective {number} is {one} instead of {other}"


def batches(rank: Rank, pair: Pair, step: int, *, shift: int = 0) -> list[torch.Tensor]:
    """The microbatches of a step; those of an attempt that raises are different."""
    numbers = range(shift, shift + pair.adapter.config.microbatches)
    return [rank.batch(step, (4, DIM), microbatch=number) for number in numbers]


def attempt(
    run: Run,
    trap: Trap,
    phase: str,
    microbatches: list[torch.Tensor],
    *,
    loss: Loss = models.mean_square,
    defers: bool = False,
) -> None:
    """Run the microbatches, of which the last raises on every rank, and the recovery call."""
    *before, last = microbatches
    with pytest.raises(trap.error), run.recorder.during("failed"):
        for batch in before:
            with run.adapter.microbatch(is_last=False):
                run.adapter.backward(loss(run.adapter.forward(batch)))
        with run.adapter.microbatch(is_last=not defers), torch.set_grad_enabled(phase != "evaluation"):
            trap.phase = "forward" if phase in ("forward", "evaluation") else ""
            value = loss(run.adapter.forward(last))
            trap.phase = "forward" if phase == "recomputation" else phase
            run.adapter.backward(value)
    run.adapter.recover()
    run.adapter.zero_grad(set_to_none=True)


def assert_nothing_gathered(pair: Pair, census: Census, when: str) -> None:
    """Check that no parameter is gathered, where that is visible."""
    adapter = pair.adapter
    if Capability.REGISTERED_STATE in adapter.capabilities():
        gathered = [name for name, is_gathered in adapter.gathered().items() if is_gathered]
        assert not gathered, f"{when} these parameters are gathered: {', '.join(gathered)}"
        if adapter.config.mesh.device_type == "cpu":
            assert not census.held(), f"{when} units are gathered (bytes): {census.held()}"
