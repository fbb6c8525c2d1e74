"""Forwards and backwards that do not pass every unit once."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import BackwardPrefetch, FullyShardedDataParallel
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, ZERO2, assert_same_whole, wrap, wrap_children
from tests.fsdp_impl.replicas import (
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
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("input_needs_grad", [False, True])
def test_frozen_units_train_around(rank: Rank, use_orig_params: bool, when: str, input_needs_grad: bool) -> None:
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
def test_what_backward_does_not_reach_is_not_gathered(rank: Rank, prefetch: BackwardPrefetch) -> None:
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
def test_a_unit_is_freed_once_backward_has_passed(rank: Rank, strategy: Any, frozen: bool) -> None:
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
def test_one_unit_may_mix_frozen_parameters_with_originals_only(rank: Rank) -> None:
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
def test_unused_outputs_and_units(rank: Rank, use_orig_params: bool) -> None:
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
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_recomputation(rank: Rank, use_orig_params: bool, reentrant: bool, outside: bool) -> None:
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
def test_a_unit_may_run_twice_and_by_itself(rank: Rank, use_orig_params: bool) -> None:
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
def test_an_inner_unit_trains_by_itself(rank: Rank, use_orig_params: bool) -> None:
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
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2])
def test_forward_may_compute_gradients_on_its_way(rank: Rank, strategy: Any, use_orig_params: bool) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy, self.out = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.out(x)
            hidden = self.energy(x)
            (force,) = torch.autograd.grad(hidden.sum(), x, retain_graph=True)
            return self.out(hidden + force)

    torch.manual_seed(0)
    model = Force()
    plain = plain_copy(model)
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, "device_id": rank.device}
    model.energy = wrap(model.energy, **options)
    sharded = wrap(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        for each in (plain, sharded):
            each(batch(rank, step, (2, 4))).square().sum().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)


@world(2)
def test_an_exception_in_forward_can_be_repeated_without(rank: Rank) -> None:
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
def test_an_exception_in_backward_can_be_repeated_without(rank: Rank, strategy: Any, use_orig_params: bool) -> None:
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
