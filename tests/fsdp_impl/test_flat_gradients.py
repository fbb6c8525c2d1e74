"""Gradients of flat parameters: accumulated, dropped, clipped."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import ShardingStrategy
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, assert_same_whole, texts, wrap, wrap_children
from tests.fsdp_impl.replicas import (
    REDUCE,
    assert_close,
    average_gradients,
    batch,
    counts,
    plain_copy,
    tower,
)


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("pattern", [(False, True, False, True), (True, False, True), (False, False, True)])
def test_gradients_accumulate_with_and_without_reductions(
    rank: Rank, strategy: ShardingStrategy, use_orig_params: bool, pattern: tuple[bool, ...]
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
    rank: Rank, use_orig_params: bool, set_to_none: bool, when: str
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
def test_some_of_what_no_sync_accumulated_may_be_dropped(rank: Rank) -> None:
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
def test_no_sync_shows_whole_gradients(rank: Rank) -> None:
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
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_a_unit_that_only_an_earlier_microbatch_used_is_reduced_too(rank: Rank, strategy: Any) -> None:
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
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_clips_by_the_norm_of_all(rank: Rank, p: float, strategy: ShardingStrategy, use_orig_params: bool) -> None:
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
def test_clipping_without_gradients_warns(rank: Rank) -> None:
    model = wrap_children(tower(5, 1), device_id=rank.device)
    norms: list[torch.Tensor] = []
    found = texts(lambda: norms.append(model.clip_grad_norm_(1.0)))
    assert found == [
        f"Called FSDP.clip_grad_norm_() on rank {rank.index} with no gradients -- returning the total norm in the "
        "default dtype torch.float32"
    ]
    assert norms[0].dtype == torch.float32 and norms[0].item() == 0


@world(2)
def test_a_rank_without_elements_clips_with_the_others(rank: Rank) -> None:
    model = wrap(nn.Linear(1, 1, bias=False), use_orig_params=True, device_id=rank.device)
    model(torch.full((1, 1), 3.0, device=rank.device)).sum().backward()
    norms: list[torch.Tensor] = []
    found = texts(lambda: norms.append(model.clip_grad_norm_(1.0)))
    assert norms[0] == 3
    assert len(found) == rank.index  # the second rank has no gradients, and says so


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("how", ["gradient", "data"])
def test_gradients_that_a_script_replaces_are_added_to(
    rank: Rank, how: str, use_orig_params: bool, strategy: Any
) -> None:
    """Other data in the same gradient are as good as another gradient: the next backward adds to them."""
    model = nn.Linear(4, 4, bias=False)
    sharded = wrap(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    for _ in range(2):
        sharded(torch.ones(1, 4, device=rank.device)).sum().backward()
    for number in range(2):
        for param in sharded.parameters():
            hundred = torch.full_like(param, 100)
            if how == "data":
                param.grad.data = hundred
            else:
                param.grad = hundred
        for _ in range(number + 1):
            sharded(torch.ones(1, 4, device=rank.device)).sum().backward()
        for param in sharded.parameters():
            assert param.grad.unique().tolist() == [101 + number]


@world(2)
@pytest.mark.parametrize("set_to_none", [False, True])
def test_two_optimizers_and_groups_of_parameters(rank: Rank, set_to_none: bool) -> None:
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
