"""FullyShardedDataParallel trains as plain copies whose gradients are averaged."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_impl import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, assert_same_whole, texts, wrap, wrap_children
from tests.fsdp_impl.replicas import (
    ALL_REDUCE,
    GATHER,
    REDUCE,
    assert_close,
    average_gradients,
    batch,
    counts,
    plain_copy,
    tower,
)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_trains_as_replicas_do(rank: Rank, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = tower(5)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, sharded)]
    for step in range(3):
        inputs = batch(rank, step, (3, 5))
        losses = [m(inputs).square().sum() for m in (plain, sharded)]
        assert_close("loss", losses[1].detach(), losses[0].detach())
        for loss in losses:
            loss.backward()
        average_gradients(plain)
        if use_orig_params:
            assert_same_whole(plain, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)


@world(4)
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
@pytest.mark.parametrize("given", ["mesh", "groups"])
def test_hybrid_strategies_shard_and_replicate(rank: Rank, strategy: ShardingStrategy, given: str) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    where: dict[str, Any] = {"device_mesh": mesh}
    if given == "groups":
        where = {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=True, device_id=rank.device, **where)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        inputs = batch(rank, step, (3, 5))
        found = counts(lambda inputs=inputs: sharded(inputs).square().sum().backward())
        gathers = 5 if strategy is ShardingStrategy.HYBRID_SHARD else 3
        assert found == {GATHER: gathers, REDUCE: 3, ALL_REDUCE: 3}
        plain(inputs).square().sum().backward()
        average_gradients(plain)
        assert_same_whole(plain, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@world(2)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_hybrid_groups_of_one(rank: Rank, shape: tuple[int, int]) -> None:
    """Shards over one rank are no shards, but what is replicated is averaged all the same."""
    mesh = rank.mesh(shape, ("replicate", "shard"))
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh, "device_id": rank.device}
    model = tower(5, 1)
    plain = plain_copy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        sharded = wrap_children(model, use_orig_params=True, **options)
    inputs = batch(rank, 0, (3, 5))
    found = counts(lambda: sharded(inputs).square().sum().backward())
    assert found == ({ALL_REDUCE: 2} if shape == (2, 1) else {GATHER: 3, REDUCE: 2})
    plain(inputs).square().sum().backward()
    average_gradients(plain)
    assert_same_whole(plain, sharded)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_counts_of_collectives(rank: Rank, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """F units: F gathers in forward and F - 1 in backward, or none; F reductions, or none inside ``no_sync``."""
    units = 4
    model = wrap_children(tower(5), sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    found = []

    def step(index: int) -> None:
        forward: dict[str, int] = {}
        loss = [torch.zeros(())]

        def run() -> None:
            loss[0] = model(batch(rank, index, (3, 5))).sum()

        forward = counts(run)
        found.append((forward, counts(loss[0].backward)))

    for index in range(3):
        with model.no_sync():
            step(index)
    for index in range(3):
        step(index)
    for index, (forward, backward) in enumerate(found):
        syncs = index >= 3
        if strategy is NONE:
            assert (forward, backward) == ({}, {ALL_REDUCE: units} if syncs else {})
            continue
        keeps = strategy is ZERO2 and 0 < index <= 3  # the iteration before was inside no_sync
        assert forward == ({} if keeps else {GATHER: units})
        expected = {GATHER: units - 1} if strategy is FULL else {}
        assert backward == (expected | {REDUCE: units} if syncs else expected)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None])
@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_prefetch_changes_nothing_but_the_order(
    rank: Rank, prefetch: BackwardPrefetch | None, forward_prefetch: bool, use_orig_params: bool
) -> None:
    model = tower(5)
    plain = plain_copy(model)
    sharded = wrap_children(
        model,
        backward_prefetch=prefetch,
        forward_prefetch=forward_prefetch,
        use_orig_params=use_orig_params,
        device_id=rank.device,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        inputs = batch(rank, step, (3, 5))
        assert counts(lambda inputs=inputs: sharded(inputs).square().sum().backward()) == {GATHER: 7, REDUCE: 4}
        plain(inputs).square().sum().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_memory_formats_are_kept(rank: Rank, strategy: Any, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Conv2d(4, 2, 3))
    plain = plain_copy(model)
    sharded = wrap(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        for each in (plain, sharded):
            each(batch(rank, step, (2, 3, 7, 7))).square().sum().backward()
        average_gradients(plain)
        if use_orig_params:
            assert_same_whole(plain, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(sharded), torch.no_grad():
            for param, other in zip(sharded.parameters(), plain.parameters(), strict=True):
                assert param.stride() == other.stride()
                param.mul_(2)
                other.mul_(2)
        assert_same_whole(plain, sharded, grads=False)


@world(2)
def test_the_root_alone_may_be_asked(rank: Rank) -> None:
    model = wrap_children(tower(5, 1), device_id=rank.device)
    assert model.check_is_root() and not model[1].check_is_root()
    with (
        pytest.raises(RuntimeError, match=r"`no_sync\(\)` on inner FSDP instances is not supported"),
        model[1].no_sync(),
    ):
        pass
    with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
        model[1].clip_grad_norm_(1.0)
    with pytest.raises(AssertionError, match="register_comm_hook can only be called on a root instance"):
        model[1].register_comm_hook(None, print)


@world(2)
def test_the_wrapper_stands_for_its_module(rank: Rank) -> None:
    inner = tower(5, 2)
    inner.answer = 42  # type: ignore[assignment]
    model = wrap_children(inner, device_id=rank.device)
    assert model.module is inner and model.answer == 42 and model[1] is inner[1]
    assert FullyShardedDataParallel.fsdp_modules(model) == [model, model[1], model[2]]
    assert FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model]
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    names = [name for name, _ in model.named_parameters()]
    prefix = "_fsdp_wrapped_module."
    assert names == [f"{prefix}_flat_param", *(f"{prefix}{i}.{prefix}_flat_param" for i in (1, 2))]


@world(2)
def test_shards_are_cut_anywhere(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 7))
    model[0], model[1] = (wrap(layer, use_orig_params=True, device_id=rank.device) for layer in model)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    prefix = "_fsdp_wrapped_module"
    expected = [((13,), (22,), (0,)), ((12,), (13,), (7,))][rank.index]
    assert shapes == dict(zip((f"0.{prefix}.weight", f"1.{prefix}.weight", f"1.{prefix}.bias"), expected, strict=True))
    for wrapper in model:
        assert wrapper._flat_param.numel() == (13 if wrapper is model[0] else 22)


@world(1)
@pytest.mark.parametrize("strategy", [None, FULL, ZERO2])
def test_one_rank_shards_nothing(rank: Rank, strategy: ShardingStrategy | None) -> None:
    models: list[FullyShardedDataParallel] = []
    found = texts(
        lambda: models.append(FullyShardedDataParallel(tower(5, 1), sharding_strategy=strategy, device_id=rank.device))
    )
    assert found == [f"FSDP is switching to use `NO_SHARD` instead of {strategy or FULL} since the world size is 1."]
    assert models[0].sharding_strategy is NONE
    assert counts(lambda: models[0](batch(rank, 0, (2, 5))).sum().backward()) == {}


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_tied_parameters_are_one(rank: Rank, use_orig_params: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    model = Tied()
    plain = plain_copy(model)
    sharded = wrap(model, use_orig_params=use_orig_params, device_id=rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        for each in (plain, sharded):
            each(batch(rank, step, (2, 4))).square().sum().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)
    with FullyShardedDataParallel.summon_full_params(sharded):
        assert sharded.a.weight is sharded.b.weight


@world(2)
def test_a_parameter_of_two_units_is_refused(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0] = wrap(model[0], use_orig_params=True, device_id=rank.device)
    with pytest.raises(ValueError, match=r"Parameter '1\.weight' is shared with a parameter that another FSDP unit"):
        wrap(model, use_orig_params=True, device_id=rank.device)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_evaluation_sees_the_latest_parameters(rank: Rank, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrap_children(
        tower(5, 1), sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device
    )
    inputs = batch(rank, 0, (2, 5), index=0)
    with torch.no_grad():
        before = model(inputs)
        assert torch.equal(model(inputs), before)
        for param in model.parameters():
            param.zero_()
        assert model(inputs).abs().sum() == 0
    with torch.inference_mode():
        assert model(inputs).abs().sum() == 0
    model(inputs).sum().backward()
    with torch.no_grad():
        before = model(inputs)
        # Its kernels do not count what they write as new versions.
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
        assert not torch.equal(model(inputs), before)


@world(2)
def test_groups_need_not_be_the_world(rank: Rank) -> None:
    groups = [dist.new_group([index]) for index in range(rank.world_size)]
    model = tower(5, 1)
    with pytest.warns(UserWarning, match="FSDP is switching to use `NO_SHARD`"):
        model[1] = FullyShardedDataParallel(model[1], process_group=groups[rank.index], device_id=rank.device)
    sharded = wrap(model, device_id=rank.device)
    found = counts(lambda: sharded(batch(rank, 0, (2, 5))).sum().backward())
    assert found == {GATHER: 1, REDUCE: 1}
    for group in groups:
        dist.destroy_process_group(group)
