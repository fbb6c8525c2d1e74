"""Whole parameters on request, and what may be done with them."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import CPUOffload, FullyShardedDataParallel, MixedPrecision
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, assert_same_whole, wrap, wrap_children
from tests.fsdp_impl.replicas import assert_close, average_gradients, batch, plain_copy, tower

summon = FullyShardedDataParallel.summon_full_params


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("after_forward", [False, True])
def test_changes_stay_with_writeback_alone(
    rank: Rank,
    writeback: bool,
    strategy: Any,
    mixed: bool,
    offload: bool,
    use_orig_params: bool,
    after_forward: bool,
) -> None:
    model = wrap_children(
        tower(5, 2),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(torch.bfloat16) if mixed else None,
        cpu_offload=CPUOffload(offload),
        device_id=rank.device,
    )
    inputs = batch(rank, 0, (2, 5), index=0)
    before = model(inputs).detach() if after_forward else None
    with summon(model, writeback=writeback), torch.no_grad():
        for param in model.parameters():
            assert param.dtype == torch.float32
            param.fill_(0.5)
    persists = writeback or (strategy is NONE and not (offload and rank.device.type != "cpu"))
    with summon(model):
        values = {bool((param == 0.5).all()) for param in model.parameters()}
    assert values == {persists}
    if before is not None:
        assert torch.equal(model(inputs), before) != persists
    model(inputs).float().sum().backward()


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_names_are_those_of_the_model(rank: Rank, use_orig_params: bool) -> None:
    model = tower(5, 2)
    model.register_buffer("ticks", torch.zeros(1))
    model[2].register_buffer("tocks", torch.zeros(1))
    plain = plain_copy(model)
    sharded = wrap_children(model, use_orig_params=use_orig_params, device_id=rank.device)
    with summon(sharded):
        for walk in ("named_parameters", "named_buffers"):
            expected = [(name, tensor.shape) for name, tensor in getattr(plain, walk)()]
            assert [(name, tensor.shape) for name, tensor in getattr(sharded, walk)()] == expected
    assert all("_fsdp_wrapped_module" in name for name, _ in sharded.named_buffers())


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_without_recursion_the_inner_units_stay_sharded(rank: Rank, use_orig_params: bool) -> None:
    model = wrap_children(tower(5, 1), use_orig_params=use_orig_params, device_id=rank.device)
    with summon(model, recurse=False):
        assert model[0].weight.shape == (5, 5)
        assert not model[1]._unit.is_summoned
    plain = nn.Sequential(wrap_children(tower(5, 1), device_id=rank.device))
    with summon(plain, recurse=False):
        assert plain[0]._unit.is_root is None
    with summon(plain):
        assert plain[0][0].weight.shape == (5, 5)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_the_first_rank_alone(rank: Rank, use_orig_params: bool, offload_to_cpu: bool) -> None:
    model = wrap_children(tower(5, 1), use_orig_params=use_orig_params, device_id=rank.device)
    with summon(model, writeback=False, rank0_only=True, offload_to_cpu=offload_to_cpu):
        sizes = sum(param.numel() for param in model.parameters())
        if rank.index == 0:
            assert sizes == sum(param.numel() for param in tower(5, 1).parameters())
            if offload_to_cpu:
                assert {param.device.type for param in model.parameters()} == {"cpu"}
        else:
            assert sizes <= sum(group.shards.layout.shard_numel for group in model._unit.groups())


@world(2)
def test_what_is_not_supported_says_so(rank: Rank) -> None:
    model = wrap_children(tower(5, 1), device_id=rank.device)
    whole = wrap(nn.Linear(2, 2), sharding_strategy=NONE, device_id=rank.device)
    for target, options, text in (
        (model, {"rank0_only": True}, "writeback=True and rank0_only=True is not supported yet"),
        (
            model,
            {"with_grads": True},
            "with_grads=True, use_orig_params=False, offload_to_cpu=False is not supported yet",
        ),
        (whole, {"offload_to_cpu": True}, "offload_to_cpu=True and NO_SHARD is not supported yet"),
    ):
        with pytest.raises(NotImplementedError, match=text), summon(target, **options):
            pass
    with (
        pytest.raises(AssertionError, match="Cannot manually unshard parameters when already unsharding parameters"),
        summon(model),
        summon(model),
    ):
        pass
    with (
        pytest.warns(UserWarning, match="may result in the unsharded parameters being redundantly"),
        summon(model, offload_to_cpu=True),
    ):
        pass
    with summon(model):  # none of it has left anything behind
        assert model[0].weight.shape == (5, 5)


@world(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_not_within_forward_or_backward(rank: Rank, where: str) -> None:
    class Nosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.outer: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            if where == "backward":
                x.register_hook(self.look)
            else:
                self.look(x)
            return torch.tanh(x)

        def look(self, _: torch.Tensor) -> None:
            with summon(self.outer[0]):
                pass

    inner = Nosy()
    model = wrap(inner, device_id=rank.device)
    inner.outer.append(model)
    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
        model(torch.ones(1, 3, device=rank.device)).sum().backward()


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("writeback", [False, True])
def test_gradients_too(rank: Rank, strategy: Any, writeback: bool) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=True, device_id=rank.device)
    with summon(sharded, with_grads=True):
        assert all(param.grad is None for param in sharded.parameters())
    for each in (plain, sharded):
        each(batch(rank, 0, (2, 5))).sum().backward()
    average_gradients(plain)
    with summon(sharded, with_grads=True, writeback=writeback):
        for param, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert_close("gradient", param.grad, expected.grad)
            param.grad.mul_(2)
    for param in plain.parameters() if writeback else ():
        param.grad.mul_(2)
    assert_same_whole(plain, sharded)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_apply_sees_whole_parameters(rank: Rank, use_orig_params: bool) -> None:
    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.ndim == 2
            module.weight.fill_(0.25)

    model = wrap_children(tower(5, 1), use_orig_params=use_orig_params, device_id=rank.device)
    assert model.apply(fill) is model
    assert model._unit.is_root is None
    with summon(model):
        for name, param in model.named_parameters():
            assert bool((param == 0.25).all()) == name.endswith("weight")


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("when", ["at once", "after a step"])
def test_a_cast_model_trains_on(rank: Rank, strategy: Any, use_orig_params: bool, when: str) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    if when == "after a step":
        for each in (plain, sharded):
            each(batch(rank, 0, (2, 5))).sum().backward()
        average_gradients(plain)
    for each in (plain, sharded):
        each.double()
    if use_orig_params:
        assert_same_whole(plain, sharded)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for each in (plain, sharded):
        each(batch(rank, 1, (2, 5)).double()).sum().backward()
    average_gradients(plain)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_whole(plain, sharded, grads=False)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_apply_is_refused_while_parameters_are_gathered(rank: Rank, use_orig_params: bool) -> None:
    model = wrap_children(tower(5, 1), use_orig_params=use_orig_params, device_id=rank.device)
    with summon(model), pytest.raises(ValueError, match=r"expected to be in states .* current state is SUMMONED"):
        model.apply(print)
    inner = model[1].module
    inner.register_forward_hook(lambda module, args, output: model.apply(print))
    with pytest.raises(ValueError, match=r"expected to be in states .* current state is FORWARD"):
        model(batch(rank, 0, (2, 5)))


@world(1, 2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_summoning_between_two_forwards_leaves_their_joint_backward(rank: Rank, use_orig_params: bool) -> None:
    """Where nothing is sharded the whole parameters are the flat one itself, and are not written onto themselves."""
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=NONE, use_orig_params=use_orig_params, device_id=rank.device)
    inputs = [batch(rank, number, (2, 5), index=0) for number in range(2)]
    first = sharded(inputs[0]).sum()
    with FullyShardedDataParallel.summon_full_params(sharded):
        pass
    (first + sharded(inputs[1]).sum()).backward()
    (plain(inputs[0]).sum() + plain(inputs[1]).sum()).backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
    found = torch.cat([param.grad.flatten() for param in sharded.parameters() if param.grad is not None])
    assert_close("norm", found.norm(), expected.norm())
    with FullyShardedDataParallel.summon_full_params(sharded):
        for param in sharded.parameters():
            param.data.fill_(3)
    with FullyShardedDataParallel.summon_full_params(sharded):
        assert all(param.eq(3).all() for param in sharded.parameters())
