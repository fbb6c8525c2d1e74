"""Shards, gradients and optimizer state on the host."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_impl import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import (
    GATHER,
    MLP,
    REDUCE,
    assert_close,
    assert_same,
    average_gradients,
    batch,
    counts,
    full,
    plain_copy,
    tower,
)


def policy(rank: Rank) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=rank.device.type != "cpu")


def on_host(model: nn.Module) -> bool:
    tensors = [param.to_local() for param in model.parameters()]
    tensors += [param.grad.to_local() for param in model.parameters() if param.grad is not None]
    return all(tensor.device.type == "cpu" for tensor in tensors)


@world(2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_trains_as_replicas_do_and_accumulates(rank: Rank, hybrid: bool) -> None:
    mesh = rank.mesh((2, rank.world_size // 2), ("replicate", "shard")) if hybrid else rank.mesh()
    model = tower(5, 2).to(rank.device)
    plain = plain_copy(model)
    for layer in model[1:]:
        fully_shard(layer, mesh=mesh, offload_policy=policy(rank))
    fully_shard(model, mesh=mesh, offload_policy=policy(rank))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1 or step == 1)
            inputs = batch(rank, 2 * step + microbatch, (3, 5))
            model(inputs).square().sum().backward()
            plain(inputs).square().sum().backward()
            assert on_host(model)
        average_gradients(plain)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close("gradient", full(one.grad), other.grad)
        norm = nn.utils.get_total_norm([param.grad for param in plain.parameters()])
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9).cpu(), norm.cpu())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


@world(2)
def test_with_other_dtypes_of_compute_and_reduction(rank: Rank) -> None:
    model = tower(4, 1)
    plain = plain_copy(model)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model, mesh=rank.mesh(), offload_policy=policy(rank), mp_policy=low)
    inputs = batch(rank, 0, (3, 4))
    model(inputs).sum().backward()
    plain.to(torch.bfloat16)(inputs.bfloat16()).float().sum().backward()
    plain.float()
    average_gradients(plain)
    assert on_host(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one.grad), other.grad, rtol=1e-2, atol=1e-2)


@world(2)
def test_counts_with_tensor_parallelism(rank: Rank) -> None:
    """At shard size one there are no collectives but those of tensor parallelism."""
    mesh = rank.mesh((1, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(MLP(4) for _ in range(3))).to(rank.device)
    plain = plain_copy(model)
    for mlp in model:
        parallelize_module(mlp, mesh["tp"], {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
        fully_shard(mlp, mesh=mesh["dp"], offload_policy=policy(rank), reshard_after_forward=True)
    fully_shard(model, mesh=mesh["dp"], offload_policy=policy(rank), reshard_after_forward=True)
    inputs, loss = batch(rank, 0, (4, 4), index=0), None

    def forward() -> None:
        nonlocal loss
        loss = model(inputs).sum()

    assert counts(forward) == {"all_reduce": 3}
    assert counts(lambda: loss.backward()) == {"all_reduce": 2}
    plain(inputs).sum().backward()
    assert on_host(model)
    if rank.device.type == "cpu":
        assert_same(plain, model)


@world(2)
def test_hooks_find_the_gradient_on_the_host(rank: Rank) -> None:
    model = fully_shard(tower(4, 1).to(rank.device), mesh=rank.mesh(), offload_policy=policy(rank))
    seen: list[bool] = []

    def hook(param: torch.Tensor) -> None:
        local = param.grad.to_local()
        seen.append(local.device.type == "cpu" and bool(local.isfinite().all()))
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    found = counts(lambda: model(batch(rank, 0, (2, 4))).sum().backward())
    assert (found[GATHER], found[REDUCE]) == (1, 1)
    assert seen == [True] * len(list(model.parameters()))


@world(1)
def test_memory_cannot_be_pinned_without_an_accelerator(rank: Rank) -> None:
    if torch.accelerator.is_available():
        return
    module = nn.Linear(2, 2)
    with pytest.raises(RuntimeError) as of_torch:  # a build with CUDA says something else
        torch.empty(1).pin_memory()
    with pytest.raises(RuntimeError, match=re.escape(str(of_torch.value).splitlines()[0])):
        fully_shard(module, mesh=rank.mesh(), offload_policy=CPUOffloadPolicy())
    assert type(module) is nn.Linear


def move_shards(model: nn.Module, rank: Rank) -> None:
    """Move an offloaded model to the device; without one, its shards become tensors that claim to be on one."""
    if rank.device.type != "cpu":
        model.to(rank.device)
        return
    fake = FakeTensorMode()
    model.reshard()  # type: ignore[operator]  # the root, which stays gathered after a forward
    for param in model.parameters():
        param._local_tensor = FakeTensor(fake, param.to_local().detach().to("meta"), torch.device("cuda:0"))


@world(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_parameters_that_were_moved_to_the_device_are_named(rank: Rank, has_run: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=rank.mesh(), offload_policy=policy(rank))
    fully_shard(model, mesh=rank.mesh(), offload_policy=policy(rank))
    inputs = batch(rank, 0, (2, 4))
    if has_run:
        model(inputs)
    move_shards(model, rank)
    named = r"on CPU when enabling CPU offloading.*\[\('[01].weight', device\(type='cuda', index=\d\)\), \('[01].bias'"
    for call in (lambda: model(inputs), model[0].unshard):
        with pytest.raises(RuntimeError, match=named):
            call()


@world(2)
def test_a_model_that_was_moved_away_and_back_trains(rank: Rank) -> None:
    model = fully_shard(tower(4, 1), mesh=rank.mesh(), offload_policy=policy(rank))
    inputs = batch(rank, 0, (2, 4))
    expected = model(inputs).detach()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta" if rank.device.type == "cpu" else rank.device)
    with pytest.raises(RuntimeError, match=r"on CPU when enabling CPU offloading.*'1.in_proj.weight'"):
        model(inputs)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    output = model(inputs)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert on_host(model)


@world(1)
def test_parameters_elsewhere_are_named(rank: Rank) -> None:
    """Meta tensors stand for another device, where there is no other."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh=rank.mesh(), offload_policy=policy(rank))
    with pytest.raises(RuntimeError, match=r"still on meta device: \['0.weight', '0.bias'\]"):
        model(torch.ones(1, 2))
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    model(torch.ones(1, 2, device=rank.device)).sum().backward()
    assert on_host(model)
