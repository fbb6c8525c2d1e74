"""Chapter SHARDING: a rank holds its share of what an implementation says it shards, and no more."""

from __future__ import annotations

import copy

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.models import optim
from shardproof.harness.parity import Rank
from shardproof.harness.parity.claims import state_numel
from shardproof.harness.tensors import memory


@contract("SHARDING-1")
@world(2, 4)
@needs(Capability.SHARDED)
def test_rank_holds_its_share(rank: Rank) -> None:
    """After backward and after a step with momentum, parameters, gradients and state are divided as declared."""
    model = models.Tower(dim=65).to(rank.device)
    shapes = [parameter.shape for parameter in model.parameters()]
    full = 4 * sum(shape.numel() for shape in shapes)
    local_numel = rank.implementation.traits.local_numel
    share = 4 * sum(local_numel(shape, rank.world_size) for shape in shapes)
    batch = rank.batch(0, (2, 65))
    # The first backward on a device allocates workspaces that stay; they are nobody's shards.
    models.mean_square(copy.deepcopy(model)(batch)).backward()

    before = memory.held_bytes(rank.device) - full
    run = rank.run(model, units=model.units(), optimizer=optim.sgd())
    run.forward_backward((batch,), loss=models.mean_square)
    after_backward = memory.held_bytes(rank.device) - before
    run.adapter.step()
    after_step = memory.held_bytes(rank.device) - before
    shards = rank.implementation.traits.shards
    parts = [share if part in shards else full for part in ("parameters", "gradients", "optimizer")]
    parts[0] += share * ("master" in rank.implementation.traits.held_from_start)
    # A quarter of one full copy is allowed for bookkeeping and buffers kept between steps.
    for when, held, expected in (("backward", after_backward, parts[:2]), ("the step", after_step, parts)):
        assert held <= sum(expected) + full // 4, (
            f"after {when} the rank holds {held} bytes; its share is {sum(expected)} of {full * len(expected)}"
        )


@contract("SHARDING-1")
@world(2, 4)
def test_state_is_divided(rank: Rank) -> None:
    """The optimizer's state is divided if the implementation claims so, and whole on each rank if not."""
    model = models.Tower(dim=17)
    full = sum(parameter.numel() for parameter in model.parameters())
    pair = rank.pair(model, units=model.units())
    pair.step(rank.batch(0, (2, 17)))
    pair.check()
    held = rank.exchange(state_numel(pair.adapter.optimizer))
    if None in held:
        # An engine that keeps its optimizer to itself: the bytes of test_rank_holds_its_share tell.
        assert Capability.SHARDED in rank.implementation.capabilities(), "there is no optimizer to look into"
    elif "optimizer" in rank.implementation.traits.shards:
        assert full <= sum(held) <= full + full // 4, f"the ranks hold {held} elements of momentum, in all {full}"
        assert max(held) < full, f"a rank holds all {full} elements of momentum: {held}"
    else:
        assert set(held) == {full}, f"the ranks hold {held} elements of momentum, {full} each"
