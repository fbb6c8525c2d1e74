"""With ``use_orig_params`` the original parameters are views of the shard, and users may put others in their place."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import FullyShardedDataParallel
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, assert_same_whole, wrap, wrap_children
from tests.fsdp_impl.replicas import average_gradients, batch, plain_copy, tower


@world(2)
def test_a_parameter_without_elements_is_flat_as_any_other(rank: Rank) -> None:
    model = nn.Linear(3, 3, device=rank.device)
    model.empty = nn.Parameter(torch.randn(0, 3, device=rank.device))
    sharded = wrap(model, use_orig_params=True, device_id=rank.device)
    assert sharded.module.empty.shape == (0,)
    with FullyShardedDataParallel.summon_full_params(sharded):
        assert sharded.module.empty.shape == (0, 3)
    assert sharded.module.empty.shape == (0,)


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_parameters_are_the_same_objects_and_live_in_one_memory(rank: Rank, strategy: Any) -> None:
    model = tower(5, 1)
    before = dict(model.named_parameters())
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=True, device_id=rank.device)

    def check() -> None:
        for name, param in sharded.named_parameters():
            assert param is before[name.replace("_fsdp_wrapped_module.", "")]
        for group in sharded._unit.groups() if sharded._unit.is_root else ():
            pointer = group.shards.flat.untyped_storage().data_ptr()
            for param in group.shards.originals:
                assert param.numel() == 0 or param.untyped_storage().data_ptr() == pointer

    check()
    output = sharded(batch(rank, 0, (2, 5)))
    check()
    output.sum().backward()
    check()
    for group in sharded._unit.groups():
        grads = [p.grad for p in group.shards.originals if p.numel() and p.grad is not None]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) <= 1


@world(2)
def test_within_forward_modules_hold_plain_views(rank: Rank) -> None:
    for use_orig_params in (False, True):
        seen: list[torch.Tensor] = []
        sharded = wrap(tower(5, 1), use_orig_params=use_orig_params, device_id=rank.device)
        for layer in (sharded[1].in_proj, sharded[1].out_proj):
            layer.register_forward_hook(lambda module, args, output, seen=seen: seen.append(module.weight))
        sharded(batch(rank, 0, (2, 5)))
        assert [weight.shape for weight in seen] == [(10, 5), (5, 10)]
        leaf = sharded._unit.group.leaf
        for weight in seen:
            assert type(weight) is torch.Tensor and weight.requires_grad and not weight.is_leaf
            assert weight.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() != 0


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("how", ["parameter", "data"])
def test_replaced_parameters_are_written_back(rank: Rank, how: str, strategy: Any) -> None:
    model = tower(5, 1)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=True, device_id=rank.device)
    with torch.no_grad():
        plain[1].in_proj.weight.mul_(2)
        inner = sharded[1].in_proj
        doubled = inner.weight.detach().clone() * 2
        if how == "parameter":
            inner.weight = nn.Parameter(doubled)
        else:
            inner.weight.data = doubled
    for step in range(2):
        for each in (plain, sharded):
            each.zero_grad()
            each(batch(rank, step, (2, 5))).sum().backward()
        average_gradients(plain)
        assert_same_whole(plain, sharded)
        for each in (plain, sharded):
            torch.optim.SGD(each.parameters(), lr=0.1).step()


@world(2)
def test_another_shape_cannot_be_written_back(rank: Rank) -> None:
    sharded = wrap(nn.Linear(5, 5, bias=False), use_orig_params=True, device_id=rank.device)
    sharded.module.weight = nn.Parameter(torch.zeros(2, device=rank.device))
    held = 13 if rank.index == 0 else 12
    with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes") as caught:
        sharded(batch(rank, 0, (2, 5)))
    assert f"Expects torch.Size([{held}]) but got torch.Size([2]) for weight" in str(caught.value)


@world(2)
def test_shared_parameters_cannot_be_replaced_one_by_one(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    sharded = wrap(model, use_orig_params=True, device_id=rank.device)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(NotImplementedError, match=r"Changing shared parameters is not supported yet: 0\.weight"):
        sharded(batch(rank, 0, (2, 4)))


@world(2)
@pytest.mark.parametrize("how", ["parameter", "data"])
def test_kept_parameters_may_not_change_before_backward(rank: Rank, how: str) -> None:
    linear = nn.Linear(5, 7)  # both ranks hold a part of its weight
    sharded = wrap(linear, sharding_strategy=ZERO2, use_orig_params=True, device_id=rank.device)
    loss = sharded(batch(rank, 0, (2, 5))).sum()
    if how == "parameter":
        linear.weight = nn.Parameter(linear.weight.detach().clone())
    else:
        linear.weight.data = linear.weight.detach().clone()
    text = "FSDP does not support changing the parameters between forward and backward for ShardingStrategy.SHARD_GRAD"
    with pytest.raises(AssertionError, match=text):
        loss.backward()


@world(2)
def test_parameters_may_be_frozen_and_thawed_between_steps(rank: Rank) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, use_orig_params=True, device_id=rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step, frozen in enumerate(("", "1.", "1.in_proj.weight", "")):
        for each in (plain, sharded):
            for name, param in each.named_parameters():
                clean = name.replace("_fsdp_wrapped_module.", "")
                param.requires_grad_(not (frozen and clean.startswith(frozen)))
            each.zero_grad()
            each(batch(rank, step, (2, 5))).square().sum().backward()
        average_gradients(plain)
        assert_same_whole(plain, sharded)
        for optimizer in optimizers:
            optimizer.step()


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_recurrent_layers_know_their_weights(rank: Rank, use_orig_params: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 5, num_layers=2), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.lstm(x)[0])

    torch.manual_seed(0)
    model = Recurrent()
    plain = plain_copy(model)
    model.lstm = wrap(model.lstm, use_orig_params=use_orig_params, device_id=rank.device)
    sharded = wrap(model, use_orig_params=use_orig_params, device_id=rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        for each in (plain, sharded):
            each(batch(rank, step, (3, 2, 4))).square().sum().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(plain, sharded, grads=False)
    assert [name for name, _ in FullyShardedDataParallel.fsdp_modules(sharded)[1].named_parameters()]


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_hooks_see_the_reduced_gradient(rank: Rank, strategy: Any, use_orig_params: bool) -> None:
    sharded = wrap_children(
        tower(5, 1), sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device
    )
    calls: dict[str, torch.Tensor] = {}
    for name, param in sharded.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda p, name=name: calls.setdefault(name, p.grad.clone())  # setdefault: a second call changes nothing
        )
    with sharded.no_sync():
        sharded(batch(rank, 0, (2, 5))).sum().backward()
    assert calls == {}
    sharded(batch(rank, 0, (2, 5))).sum().backward()
    found = {name: param.grad for name, param in sharded.named_parameters() if param.grad is not None}
    assert calls.keys() == found.keys()
    assert all(torch.equal(calls[name], grad) for name, grad in found.items())


@world(2)
def test_optimizers_in_backward_need_the_originals(rank: Rank) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = tower(5, 1)
    plain = plain_copy(model)
    sharded = wrap_children(model, use_orig_params=True, device_id=rank.device)
    flat = wrap_children(tower(5, 1), device_id=rank.device)
    for each in (sharded, flat):
        _apply_optimizer_in_backward(torch.optim.SGD, each.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="FSDP optimizer in backward only supported with use_orig_params=True!"):
        flat(batch(rank, 0, (2, 5)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for each in (plain, sharded):
            each(batch(rank, step, (2, 5))).square().sum().backward()
        average_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in sharded.parameters())
        assert_same_whole(plain, sharded, grads=False)
