"""FullyShardedDataParallel trains as plain copies whose gradients are averaged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_impl import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from harness import world
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
def test_trains_as_replicas_do(rank: Any, strategy: ShardingStrategy, use_orig_params: bool) -> None:
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
def test_hybrid_strategies_shard_and_replicate(rank: Any, strategy: ShardingStrategy, given: str) -> None:
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
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_counts_of_collectives(rank: Any, strategy: ShardingStrategy, use_orig_params: bool) -> None:
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
    rank: Any, prefetch: BackwardPrefetch | None, forward_prefetch: bool, use_orig_params: bool
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
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("pattern", [(False, True, False, True), (True, False, True), (False, False, True)])
def test_gradients_accumulate_with_and_without_reductions(
    rank: Any, strategy: ShardingStrategy, use_orig_params: bool, pattern: tuple[bool, ...]
) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step, syncs in enumerate(pattern):
        inputs = batch(rank, step, (3, 5))
        plain(inputs).square().sum().backward()
        if syncs:
            sharded(inputs).square().sum().backward()
        else:
            with sharded.no_sync():
                assert REDUCE not in counts(lambda inputs=inputs: sharded(inputs).square().sum().backward())
    average_gradients(plain)
    if use_orig_params:
        assert_same_whole(plain, sharded)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_whole(plain, sharded, grads=False)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("when", ["before", "between"])
def test_zero_grad_forgets_what_no_sync_accumulated(
    rank: Any, use_orig_params: bool, set_to_none: bool, when: str
) -> None:
    model = tower(5, 1)
    plain = plain_copy(model)
    sharded = wrap_children(model, use_orig_params=use_orig_params, device_id=rank.device)
    with sharded.no_sync():
        sharded(batch(rank, 0, (3, 5))).sum().backward()
    shown = [param.grad for param in sharded.parameters()]
    assert all(grad is not None and grad.numel() > 0 for grad in shown)
    if when == "before":
        sharded.zero_grad(set_to_none=set_to_none)
    loss = sharded(batch(rank, 1, (3, 5))).square().sum()
    if when == "between":
        sharded.zero_grad(set_to_none=set_to_none)
    loss.backward()
    plain(batch(rank, 1, (3, 5))).square().sum().backward()
    average_gradients(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_whole(plain, sharded, grads=False)


@world(2)
def test_some_of_what_no_sync_accumulated_may_be_dropped(rank: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain = plain_copy(model)
    sharded = wrap(model, use_orig_params=True, device_id=rank.device)
    plain(batch(rank, 0, (2, 5))).sum().backward()
    with sharded.no_sync():
        sharded(batch(rank, 0, (2, 5))).sum().backward()
    for each in (plain, sharded):
        dict(each.named_parameters())["0.weight" if each is plain else "_fsdp_wrapped_module.0.weight"].grad = None
        each(batch(rank, 1, (2, 5))).sum().backward()
    average_gradients(plain)
    assert_same_whole(plain, sharded)


@world(2)
def test_no_sync_shows_whole_gradients(rank: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain = plain_copy(model)
    sharded = wrap(model, use_orig_params=True, device_id=rank.device)
    inputs = batch(rank, 0, (2, 5))
    for times in (1, 2):
        with sharded.no_sync():
            sharded(inputs).sum().backward()
        plain(inputs).sum().backward()
        for expected, param in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert_close(f"{times} times", param.grad, expected.grad)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_clips_by_the_norm_of_all(rank: Any, p: float, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = tower(5)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    for max_norm in (1.0, 1e6):
        inputs = 100 * batch(rank, 0, (3, 5))
        for each in (plain, sharded):
            each.zero_grad()
            each(inputs).sum().backward()
        average_gradients(plain)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, p)
        assert_close("norm", sharded.clip_grad_norm_(max_norm, p), expected)
        if use_orig_params:
            assert_same_whole(plain, sharded)


@world(2)
def test_clipping_without_gradients_warns(rank: Any) -> None:
    model = wrap_children(tower(5, 1), device_id=rank.device)
    norms: list[torch.Tensor] = []
    found = texts(lambda: norms.append(model.clip_grad_norm_(1.0)))
    assert found == [
        f"Called FSDP.clip_grad_norm_() on rank {rank.index} with no gradients -- returning the total norm in the "
        "default dtype torch.float32"
    ]
    assert norms[0].dtype == torch.float32 and norms[0].item() == 0


@world(2)
def test_a_rank_without_elements_clips_with_the_others(rank: Any) -> None:
    model = wrap(nn.Linear(1, 1, bias=False), use_orig_params=True, device_id=rank.device)
    model(torch.full((1, 1), 3.0, device=rank.device)).sum().backward()
    norms: list[torch.Tensor] = []
    found = texts(lambda: norms.append(model.clip_grad_norm_(1.0)))
    assert norms[0] == 3
    assert len(found) == rank.index  # the second rank has no gradients, and says so


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_memory_formats_are_kept(rank: Any, strategy: Any, use_orig_params: bool) -> None:
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
def test_the_root_alone_may_be_asked(rank: Any) -> None:
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
def test_the_wrapper_stands_for_its_module(rank: Any) -> None:
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
def test_shards_are_cut_anywhere(rank: Any) -> None:
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
def test_one_rank_shards_nothing(rank: Any, strategy: ShardingStrategy | None) -> None:
    models: list[FullyShardedDataParallel] = []
    found = texts(
        lambda: models.append(FullyShardedDataParallel(tower(5, 1), sharding_strategy=strategy, device_id=rank.device))
    )
    assert found == [f"FSDP is switching to use `NO_SHARD` instead of {strategy or FULL} since the world size is 1."]
    assert models[0].sharding_strategy is NONE
    assert counts(lambda: models[0](batch(rank, 0, (2, 5))).sum().backward()) == {}


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_tied_parameters_are_one(rank: Any, use_orig_params: bool) -> None:
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
def test_a_parameter_of_two_units_is_refused(rank: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0] = wrap(model[0], use_orig_params=True, device_id=rank.device)
    with pytest.raises(ValueError, match=r"Parameter '1\.weight' is shared with a parameter that another FSDP unit"):
        wrap(model, use_orig_params=True, device_id=rank.device)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("input_needs_grad", [False, True])
def test_frozen_units_train_around(rank: Any, use_orig_params: bool, when: str, input_needs_grad: bool) -> None:
    model = tower(5)
    plain = plain_copy(model)
    plain[1].requires_grad_(False)
    plain[2].requires_grad_(False)
    if when == "before":
        for index in (1, 2):
            model[index].requires_grad_(False)
    sharded = wrap_children(model, use_orig_params=use_orig_params, device_id=rank.device)
    if when == "after":
        for index in (1, 2):
            sharded[index].requires_grad_(False)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        inputs = batch(rank, step, (3, 5)).requires_grad_(input_needs_grad)

        def run(inputs: torch.Tensor = inputs) -> None:
            sharded(inputs).square().sum().backward()

        assert counts(run) == {GATHER: 7, REDUCE: 2}
        plain(inputs).square().sum().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)
        for group in sharded._unit.groups():
            assert not group.is_unsharded


@world(2)
@pytest.mark.parametrize("prefetch", list(BackwardPrefetch))
def test_what_backward_does_not_reach_is_not_gathered(rank: Any, prefetch: BackwardPrefetch) -> None:
    model = tower(5)[1:]
    model[0].requires_grad_(False)
    for index in range(3):
        model[index] = wrap(model[index], backward_prefetch=prefetch, device_id=rank.device)
    sharded = wrap(model, device_id=rank.device)
    for step in range(2):
        found = counts(lambda step=step: sharded(batch(rank, step, (3, 5))).sum().backward())
        assert found == {GATHER: 3 + 2, REDUCE: 2}
        assert sharded._unit.iteration.forward_order == []


@world(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2])
def test_a_unit_is_freed_once_backward_has_passed(rank: Any, strategy: Any, frozen: bool) -> None:
    model = tower(5, 3)
    model[2].requires_grad_(not frozen)
    sharded = wrap_children(model, sharding_strategy=strategy, device_id=rank.device)
    seen: list[bool] = []

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: seen.append(sharded[2]._unit.group.is_unsharded))

    sharded[1].module.in_proj.register_forward_hook(watch)  # backward gets there after unit 2
    sharded(batch(rank, 0, (3, 5))).sum().backward()
    assert seen == [False]


@world(2)
def test_one_unit_may_mix_frozen_parameters_with_originals_only(rank: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].weight.requires_grad_(False)
    plain = plain_copy(model)
    with pytest.raises(
        ValueError, match="Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
    ):
        wrap(model, device_id=rank.device)
    sharded = wrap(model, use_orig_params=True, device_id=rank.device)
    for each in (plain, sharded):
        each(batch(rank, 0, (2, 5))).sum().backward()
    average_gradients(plain)
    assert_same_whole(plain, sharded)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_unused_outputs_and_units(rank: Any, use_orig_params: bool) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b, self.never = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.tanh(self.trunk(x))
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model = Heads()
    plain = plain_copy(model)
    for name in ("a", "b", "never"):
        setattr(model, name, wrap(getattr(model, name), use_orig_params=use_orig_params, device_id=rank.device))
    sharded = wrap(model, use_orig_params=use_orig_params, device_id=rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(4):
        for each in (plain, sharded):
            a, b = each(batch(rank, step, (2, 4)))
            (a.sum() + b.square().sum() if step < 2 else a.square().sum()).backward()
        average_gradients(plain)
        if use_orig_params:
            assert_same_whole(plain, sharded)
        assert sharded.never._flat_param.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_a_unit_that_only_an_earlier_microbatch_used_is_reduced_too(rank: Any, strategy: Any) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=True, device_id=rank.device)
    with sharded.no_sync():
        sharded(batch(rank, 0, (2, 5))).sum().backward()
    plain(batch(rank, 0, (2, 5))).sum().backward()
    for each in (plain, sharded):
        each[1](batch(rank, 1, (2, 5))).sum().backward()
    average_gradients(plain)
    assert_same_whole(plain, sharded)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_recomputation(rank: Any, use_orig_params: bool, reentrant: bool, outside: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = tower(5)
    plain = plain_copy(model)
    options = {"use_orig_params": use_orig_params, "device_id": rank.device}
    for index in (1, 2, 3):
        inner = model[index]
        model[index] = Checkpointed(wrap(inner, **options)) if outside else wrap(Checkpointed(inner), **options)
    sharded = wrap(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        for each in (plain, sharded):
            each(batch(rank, step, (3, 5))).square().sum().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(sharded, writeback=False):
            for expected, param in zip(plain.parameters(), sharded.parameters(), strict=True):
                assert_close("parameter", param.detach(), expected.detach())


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_may_run_twice_and_by_itself(rank: Any, use_orig_params: bool) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, use_orig_params=use_orig_params, device_id=rank.device)

    def loss(m: Any) -> torch.Tensor:
        hidden = m[1](m[1](m(batch(rank, 0, (3, 5)))))
        return hidden.square().sum()

    for each in (plain, sharded):
        loss(each).backward()
    average_gradients(plain)
    if use_orig_params:
        assert_same_whole(plain, sharded)
    assert all(not group.is_unsharded for group in sharded._unit.groups())


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_evaluation_sees_the_latest_parameters(rank: Any, strategy: ShardingStrategy, use_orig_params: bool) -> None:
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


@world(2)
def test_an_exception_in_forward_can_be_repeated_without(rank: Any) -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() == 0:
                raise LookupError("zeros")
            return x

    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(nn.Sequential(*model, Picky()), use_orig_params=True, device_id=rank.device)
    sharded._fsdp_wrapped_module[0].weight  # noqa: B018
    inner = sharded[2]
    broken = inner.register_forward_hook(lambda *_: (_ for _ in ()).throw(LookupError("broken")))
    with pytest.raises(LookupError):
        sharded(batch(rank, 0, (2, 5)))
    broken.remove()
    assert not any(group.is_unsharded for group in sharded._unit.groups())
    assert all(param.is_leaf for param in sharded.parameters())
    for each in (plain, sharded):
        each(batch(rank, 1, (2, 5))).sum().backward()
    average_gradients(plain)
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
        for expected, param in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert_close("gradient", param.grad, expected.grad)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2])
def test_an_exception_in_backward_can_be_repeated_without(rank: Any, strategy: Any, use_orig_params: bool) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    hidden: list[torch.Tensor] = []
    spy = sharded[1].module.in_proj.register_forward_hook(lambda module, args, output: hidden.append(output))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    loss = sharded(batch(rank, 0, (2, 5))).square().sum()
    hidden[0].register_hook(lambda grad: (_ for _ in ()).throw(LookupError("broken")))
    with pytest.raises(LookupError):
        loss.backward()
    spy.remove()
    optimizers[1].zero_grad()
    for step in range(2):
        for each in (plain, sharded):
            each(batch(rank, step, (2, 5))).square().sum().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)
    assert not any(group.is_unsharded for group in sharded._unit.groups())


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_inner_unit_trains_by_itself(rank: Any, use_orig_params: bool) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, use_orig_params=use_orig_params, device_id=rank.device)
    assert sharded.check_is_root()
    for each in (plain, sharded):
        each[1](batch(rank, 0, (2, 5))).sum().backward()
    average_gradients(plain)
    if use_orig_params:
        assert_same_whole(plain, sharded)
    assert not any(group.is_unsharded for group in sharded._unit.groups())
    for each in (plain, sharded):
        each(batch(rank, 1, (2, 5))).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert all(group.leaf is None or group.leaf.grad is None for group in sharded._unit.groups())


@world(2)
def test_groups_need_not_be_the_world(rank: Any) -> None:
    groups = [dist.new_group([index]) for index in range(rank.world_size)]
    model = tower(5, 1)
    with pytest.warns(UserWarning, match="FSDP is switching to use `NO_SHARD`"):
        model[1] = FullyShardedDataParallel(model[1], process_group=groups[rank.index], device_id=rank.device)
    sharded = wrap(model, device_id=rank.device)
    found = counts(lambda: sharded(batch(rank, 0, (2, 5))).sum().backward())
    assert found == {GATHER: 1, REDUCE: 1}
    for group in groups:
        dist.destroy_process_group(group)


@world(2)
@pytest.mark.parametrize("set_to_none", [False, True])
def test_two_optimizers_and_groups_of_parameters(rank: Any, set_to_none: bool) -> None:
    model = tower(5, 1)
    plain = plain_copy(model)
    sharded = wrap_children(model, use_orig_params=True, device_id=rank.device)

    def optimizers(m: nn.Module) -> list[torch.optim.Optimizer]:
        weights, biases = ([p for n, p in m.named_parameters() if n.endswith(kind)] for kind in ("weight", "bias"))
        return [torch.optim.SGD(weights, lr=0.1, weight_decay=0.1), torch.optim.AdamW(biases, lr=0.01)]

    pairs = list(zip(optimizers(plain), optimizers(sharded), strict=True))
    for step in range(3):
        for each in (plain, sharded):
            each(batch(rank, step, (3, 5))).square().sum().backward()
        average_gradients(plain)
        for pair in pairs:
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        assert_same_whole(plain, sharded, grads=False, rtol=1e-4, atol=1e-5)
