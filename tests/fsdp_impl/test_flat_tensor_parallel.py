"""Flat parameters beside tensor parallelism: DTensor parameters come in, and DTensors is what forward sees."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_impl import CPUOffload, FullyShardedDataParallel
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, wrap
from tests.fsdp_impl.replicas import assert_close, average_gradients, batch, counts, full


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.net3 = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net3(self.net2(torch.tanh(self.net1(x))))


def parallel(rank: Rank, model: nn.Module) -> tuple[nn.Module, Any]:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    return parallelize_module(model.to(rank.device), mesh["tp"], plan), mesh


@world(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("offload", [False, True])
def test_trains_as_data_parallel_ranks_do(rank: Rank, strategy: Any, use_orig_params: bool, offload: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model).to(rank.device)
    model, mesh = parallel(rank, model)
    sharded = wrap(
        model,
        device_mesh=mesh["dp"],
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload),
        device_id=rank.device,
    )
    dp = mesh["dp"]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, sharded)]
    for step in range(3):
        inputs = batch(rank, step, (3, 5), index=dp.get_local_rank())
        outputs = [m(inputs) for m in (plain, sharded)]
        assert_close("output", outputs[1].detach(), outputs[0].detach())
        for output in outputs:
            output.square().sum().backward()
        average_gradients(plain, dp.get_group())
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert_close("norm", sharded.clip_grad_norm_(1.0), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(sharded, writeback=False):
            for (name, param), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
                assert isinstance(param, DTensor) == (not name.startswith("net3"))
                assert_close(name, full(param.detach()), other.detach())


@world(4)
def test_gradients_come_back_whole(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model).to(rank.device)
    model, mesh = parallel(rank, model)
    sharded = wrap(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=rank.device)
    inputs = batch(rank, 0, (3, 5), index=mesh["dp"].get_local_rank())
    for each in (plain, sharded):
        each(inputs).square().sum().backward()
    average_gradients(plain, mesh.get_group("dp"))
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
        for (name, param), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            assert_close(name, full(param.grad), other.grad)
    # And changes go back to the shards of both.
    with FullyShardedDataParallel.summon_full_params(sharded), torch.no_grad():
        for param in sharded.parameters():
            param.mul_(3)
    with FullyShardedDataParallel.summon_full_params(sharded):
        for (name, param), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert_close(name, full(param.detach()), 3 * other.detach())


@world(4)
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_ignored_ones_count_in_the_norm(rank: Rank, p: float) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model).to(rank.device)
    model, mesh = parallel(rank, model)
    options = {"ignored_modules": [model.net1], "use_orig_params": True, "device_id": rank.device}
    sharded = wrap(model, device_mesh=mesh["dp"], **options)
    inputs = batch(rank, 0, (3, 5), index=0)  # equal on all ranks, as nothing averages what is ignored
    for each in (plain, sharded):
        each(inputs).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
    assert_close("norm", sharded.clip_grad_norm_(0.1, p), expected)
    for name, param in model.net1.named_parameters():
        assert_close(name, full(param.grad), plain.net1.get_parameter(name).grad)


class Normed(nn.Module):
    """A replicated DTensor parameter: its gradient is a pending sum over the tensor-parallel ranks."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        torch.manual_seed(5)
        self.weight = nn.Parameter(distribute_tensor(torch.ones(10), mesh, [Replicate()]))
        self.linear = nn.Linear(10, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, self.mesh, [Shard(0)])
        return self.out(torch.tanh(self.linear((x * self.weight).to_local())))


@world(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_of_replicated_parameters_are_summed_over_their_mesh(rank: Rank, use_orig_params: bool) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = Normed(mesh["tp"])
    parallelize_module(
        model,
        mesh["tp"],
        {"linear": ColwiseParallel(input_layouts=Shard(0)), "out": RowwiseParallel(output_layouts=Shard(0))},
    )
    sharded = wrap(
        model.to(rank.device), device_mesh=mesh["dp"], use_orig_params=use_orig_params, device_id=rank.device
    )
    inputs = batch(rank, 0, (2, 10))
    found = counts(lambda: sharded(inputs).sum().backward())
    assert found == {
        "_allgather_base_": 1,
        "_reduce_scatter_base_": 1,
        "all_reduce": 1,
        "all_gather_into_tensor": 2,
        "reduce_scatter_tensor": 2,
    }
    grads = [param.grad for param in sharded.parameters() if param.grad is not None]
    assert grads and not any(grad.isnan().any() for grad in grads)
    group = sharded._unit.group
    assert group is not None
    (index,) = [i for i, name in enumerate(group.shards.names) if name == "weight"]
    span = group.shards.spans[index]
    if use_orig_params:
        part = group.shards.originals[index].grad if span.numel else torch.empty(0, device=rank.device)
    else:
        part = group.shards.flat.grad[span.offset : span.offset + span.numel]
    parts = rank.exchange(part.cpu())
    same = mesh["dp"].get_local_rank() * 2
    assert torch.equal(parts[same], parts[same + 1])


@world(4)
def test_the_first_rank_gives_replicated_values_too(rank: Rank) -> None:
    class Values(nn.Module):
        def __init__(self, mesh: Any) -> None:
            super().__init__()
            local = torch.rand(8, 8, device=rank.device)
            self.param = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
            self.register_buffer(
                "buffer",
                DTensor.from_local(torch.rand(8, 8, device=rank.device), mesh, [Replicate()], run_check=False),
            )

    torch.manual_seed(rank.index)
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = Values(mesh["tp"])
    expected = [tensor.to_local().detach().clone() for tensor in (model.param, model.buffer)]
    for tensor in expected:
        dist.broadcast(tensor, group_src=0, group=mesh.get_group("dp"))
    sharded = wrap(model, device_mesh=mesh["dp"], sync_module_states=True, device_id=rank.device)
    with FullyShardedDataParallel.summon_full_params(sharded):
        for tensor, other in zip((sharded.param, sharded.buffer), expected, strict=True):
            assert torch.equal(tensor.to_local(), other)
