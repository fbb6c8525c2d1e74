"""Chapter SHARDING: a rank holds its share of the tensors that an implementation declares sharded, and no more."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Rank, Run, contract, each_value, meaningful_from, models, needs, world
from shardproof.testing.axes import FLAT, SHARDS, subjects
from shardproof.testing.casts import run_and_replica, step_and_check
from shardproof.testing.compare import StepPicture, check_exact, each_once
from shardproof.testing.make import Accumulation, Clip, FullParams, Precision, tower
from shardproof.testing.measure import memory, state_numel
from shardproof.testing.train import batches, mixed, optim, train_and_check

pytestmark = world(2, 4)

_CHOOSES, _REPLICAS = needs(Capability.RESHARD_AFTER_FORWARD), [needs(Capability.HYBRID), meaningful_from(4)]
#: How parameters are placed on the ranks, and whether forward frees the units that it has gathered.
LAYOUTS = [
    pytest.param(("shards", True), id="freed", marks=[_CHOOSES, meaningful_from(4)]),
    pytest.param(("shards", False), id="kept", marks=[_CHOOSES, meaningful_from(4)]),
    pytest.param(("replicas", True), id="replicas-freed", marks=[_CHOOSES, *_REPLICAS]),
    pytest.param(("replicas", False), id="replicas-kept", marks=[_CHOOSES, *_REPLICAS]),
    pytest.param(("replicas-alone", None), id="replicas-alone", marks=[needs(Capability.NO_SHARD), meaningful_from(4)]),
]


@contract("SHARDING-1")
@needs(Capability.SHARDED)
def test_rank_holds_its_share(rank: Rank) -> None:
    """After backward and after a step with momentum, parameters, gradients and state are divided as declared."""
    model = models.Tower(dim=65).to(rank.device)
    shapes = [parameter.shape for parameter in model.parameters()]
    full = 4 * sum(shape.numel() for shape in shapes)
    local_numel = rank.implementation.traits.local_numel
    share = 4 * sum(local_numel(shape, rank.world_size) for shape in shapes)
    batch = rank.batch(0, (2, 65))
    # The first backward on a device allocates workspaces that stay, and that are no shards.
    models.mean_square(copy.deepcopy(model)(batch)).backward()

    before = memory.held_bytes(rank.device) - full
    run = rank.run(model, units=model.units(), optimizer=optim.sgd())
    shards = rank.implementation.traits.shards
    parts = [share if part in shards else full for part in ("parameters", "gradients", "optimizer")]
    parts[0] += share * ("master" in rank.implementation.traits.held_from_start)

    def check(when: str, expected: list[int]) -> None:
        # A quarter of one full copy is allowed for bookkeeping and buffers kept between steps.
        limit = sum(expected) + full // 4
        held = memory.settled_bytes(rank.device, limit=before + limit) - before
        whole = full * len(expected)
        assert held <= limit, f"after {when} the rank holds {held} bytes; its share is {sum(expected)} of {whole}"

    run.forward_backward((batch,), loss=models.mean_square)
    check("backward", parts[:2])
    run.adapter.step()
    check("the step", parts)


@contract("SHARDING-1")
def test_state_is_divided(rank: Rank) -> None:
    """The optimizer's state is divided if the implementation declares it, and full on each rank if not."""
    model = models.Tower(dim=17)
    full = sum(parameter.numel() for parameter in model.parameters())
    pair = rank.pair(model, units=model.units())
    pair.checked_step(rank.batch(0, (2, 17)))
    held = rank.exchange(state_numel(pair.adapter))
    if None in held:
        # An engine that keeps its optimizer private: test_rank_holds_its_share measures its bytes.
        assert Capability.SHARDED in rank.implementation.capabilities(), "there is no optimizer to look into"
    elif "optimizer" in rank.implementation.traits.shards:
        assert full <= sum(held) <= full + full // 4, f"the ranks hold {held} elements of momentum, in all {full}"
        assert max(held) < full, f"a rank holds all {full} elements of momentum: {held}"
    else:
        assert set(held) == {full}, f"the ranks hold {held} elements of momentum, {full} each"


@contract("SHARDING-1")
def test_bytes_that_a_step_adds(rank: Rank) -> None:
    """The bytes that backward and a first step with momentum add are a share of gradients and state, if divided.

    This holds also where parameters are full on every rank, as with ZeRO's stages 1 and 2.
    """
    model = models.Tower(dim=65).to(rank.device)
    shapes = [parameter.shape for parameter in model.parameters()]
    full, traits = 4 * sum(shape.numel() for shape in shapes), rank.implementation.traits
    share = 4 * sum(traits.local_numel(shape, rank.world_size) for shape in shapes)
    batch = rank.batch(0, (2, 65))
    models.mean_square(copy.deepcopy(model)(batch)).backward()  # as above
    run = rank.run(model, units=model.units(), optimizer=optim.sgd())

    def check(what: str, part: str, before: int) -> int:
        # Again a quarter for bookkeeping; implementations that divide by full parameters have unequal shares.
        is_divided = part in traits.shards
        limit = (share if is_divided else full) + full // 4
        held = memory.settled_bytes(rank.device, limit=before + limit)
        added = rank.exchange(held - before)
        assert sum(added) <= rank.world_size * limit, f"{what} adds {added} bytes to what the ranks hold, of {full}"
        assert not is_divided or max(added) < full, f"{what} adds all of {full} bytes to what a rank holds: {added}"
        return held

    # The first backward may allocate buffers that stay, such as those of DDP.
    run.forward_backward((batch,), loss=models.mean_square)
    before = memory.held_bytes(rank.device)
    run.adapter.step()
    stepped = check("the first step", "optimizer", before)
    run.adapter.zero_grad(set_to_none=True)
    before = memory.settled_bytes(rank.device, limit=stepped - 1)
    run.forward_backward((batch,), loss=models.mean_square)
    check("backward", "gradients", before)


@contract("SHARDING-2")
@needs(Capability.NO_SHARD, Capability.COUNTED_UNITS, Capability.DEFERRED_REDUCTION, Capability.CLIPPING)
@each_value("flat")
@FLAT
def test_full_on_every_rank(rank: Rank, flat: bool) -> None:
    """Where nothing is sharded, a step all-reduces each unit once, after the last microbatch, and gathers nothing.

    This holds also where user code has chosen to gather ahead in forward.
    """
    ahead = True if Capability.BACKWARD_PREFETCH in rank.implementation.capabilities() else None
    options: dict[str, Any] = {"shards": False, "flat_parameters": flat, "forward_prefetch": ahead}
    pair = tower(rank, microbatches=2, accumulation=Accumulation(), clip=Clip(0.01), **options)
    for step in range(3):
        pair.evaluate(rank.batch(step, (2, 9), microbatch=2))
        pair.checked_step([rank.batch(step, (4, 9), microbatch=number) for number in range(2)], set_to_none=step != 1)
        pair.check_counts("forward")
        pair.check_counts("backward", all_reduce=len(pair.units))
        pair.check_counts("clip")


@contract("SHARDING-3")
@needs("flat_parameters", Capability.DEFERRED_REDUCTION, Capability.CLIPPING)
@pytest.mark.parametrize("flat", [False, True], ids=["originals", "flat"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_both_kinds(rank: Rank, layout: tuple[str, bool | None], flat: bool) -> None:
    """Every layout trains with the model's own parameters and with flat ones: shards, replicas of shards, full ones."""
    kind, reshard_after_forward = layout
    # Two ranks form one replica: with two replicas, each would be one rank.
    mesh = rank.mesh((rank.world_size // 2, 2), ("replicate", "shard")) if kind == "replicas" else None
    options: dict[str, Any] = {"mesh": mesh, "shards": kind != "replicas-alone", "flat_parameters": flat}
    options |= {"reshard_after_forward": reshard_after_forward, "clip": Clip(0.01)}
    pair = tower(rank, microbatches=2, accumulation=Accumulation(), **options)
    train_and_check(pair, batches(rank, 3, (4, 9), microbatches=2), set_to_none="even")


@contract("SHARDING-2")
@world(2)
@needs(Capability.NO_SHARD, "precision.param_dtype", "precision.reduce_dtype")
@subjects("defers", [False, pytest.param(True, marks=needs(Capability.DEFERRED_REDUCTION))])
def test_full_on_every_rank_in_another_dtype(rank: Rank, defers: bool) -> None:
    """Unsharded units with dtypes of their own are all-reduced once a step, and nothing is gathered."""
    # Deferred gradients may add up in the dtype of compute: it is that of their reduction too.
    precision = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16 if defers else torch.float32)
    options: dict[str, Any] = {"microbatches": 2, "accumulation": Accumulation()} if defers else {}
    run, replica = run_and_replica(
        rank, mixed.Mixed(), units=[["low"], ["high"]], optimizer=optim.sgd(), shards=False, precision=precision,
        **options,
    )  # fmt: skip
    for step in range(3):
        batch = [(rank.batch(step, (6, 4), microbatch=number),) for number in range(1 + defers)]
        step_and_check(rank, run, replica, batch, number=step, loss=torch.sum)


@contract("SHARDING-4")
@world(2)
@needs("precision.param_dtype", Capability.NO_SHARD)
@pytest.mark.parametrize("change", ["step", pytest.param("edit", marks=needs(Capability.SUMMON_FULL_PARAMS))])
def test_changes_of_full_parameters_in_another_dtype(rank: Rank, change: str) -> None:
    """Where nothing is sharded and units compute in another dtype, an evaluation does not hide a later change."""
    model, batch = mixed.Mixed(), rank.batch(0, (6, 4))

    def last_output(*, evaluates: bool) -> torch.Tensor:
        run = rank.run(
            models.copy_of(model), units=[["low"], ["high"]], optimizer=optim.sgd(), shards=False,
            precision=Precision(param_dtype=torch.bfloat16),
        )  # fmt: skip
        run.forward_backward((batch,), loss=torch.sum)
        if evaluates:
            run.evaluate((batch,))
        if change == "step":
            run.adapter.step()
        else:
            # Full parameters are those that the rank holds, so writes to them are retained.
            with run.adapter.summon_full_params(FullParams(writeback=False)) as found, torch.no_grad():
                for parameter in found.values():
                    parameter.mul_(0.5)
        return run.evaluate((batch,))[0]

    found, expected = last_output(evaluates=True), last_output(evaluates=False)
    assert torch.equal(found, expected), f"an evaluation after a change ({change}) uses what one before it has cast"


def halve(run: Run, *, in_place: bool) -> None:
    """Halve the data of all parameters, in place or by new data."""
    for parameter in each_once(run.adapter.named_parameters()).values():
        if in_place:
            parameter.data.mul_(0.5)
        else:
            parameter.data = parameter.data * 0.5


@contract("SHARDING-5")
@world(2)
@needs(Capability.NO_SHARD, "flat_parameters")
@FLAT
def test_new_data_of_full_parameters(rank: Rank, flat: bool) -> None:
    """Where nothing is sharded, a forward uses the new data that user code assigned to parameters after a step."""
    model, batch = mixed.Mixed(), rank.batch(0, (6, 4))

    def output(*, in_place: bool) -> torch.Tensor:
        run = rank.run(
            models.copy_of(model), units=[["low"], ["high"]], optimizer=optim.sgd(), shards=False, flat_parameters=flat
        )
        run.step([(batch,)], loss=torch.sum)
        halve(run, in_place=in_place)
        return run.evaluate((batch,))[0]

    assert torch.equal(output(in_place=False), output(in_place=True)), "a forward does not use new data of parameters"


@contract("SHARDING-5")
@needs("flat_parameters")
@FLAT
@SHARDS
def test_steps_with_new_data(rank: Rank, shards: bool, flat: bool) -> None:
    """The next step changes the new data that user code assigns to parameters between two steps, sharded or not."""
    model = models.Tower(dim=9)

    def last_step(*, in_place: bool) -> StepPicture:
        run = rank.run(
            models.copy_of(model), units=model.units(), optimizer=optim.sgd(), shards=shards, flat_parameters=flat
        )
        for step in range(2):
            run.step([(rank.batch(step, (4, 9)),)], loss=models.mean_square)
            halve(run, in_place=in_place)
        return run.step([(rank.batch(2, (4, 9)),)], loss=models.mean_square)

    pictures = (last_step(in_place=one) for one in (False, True))
    check_exact(rank, *pictures, step=2, why="the same values, given otherwise")


@contract("SHARDING-1")
@world(2)
@needs(Capability.SHARDED)
def test_deep_modules(rank: Rank) -> None:
    """Parameters of modules that lie deep in a unit are sharded and trained like others."""
    model: nn.Module = nn.Linear(9, 9)
    for _ in range(6):
        model = nn.Sequential(model, nn.Tanh())
    pair = rank.pair(model, units=[["0"]])
    train_and_check(pair, batches(rank, 2, (4, 9)))
    assert any(item.kind == "reduce_scatter" for item in pair.last_trace()), "the deep module is not sharded"
