"""Composition with tensor, sequence and pipeline parallelism: DTensor parameters as input."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_impl import DataParallelMeshDims, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import MLP, assert_close, assert_same, average_gradients, batch, full, plain_copy


def mlps(dim: int, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MLP(dim) for _ in range(2)), *([nn.LayerNorm(dim)] if norm else []))


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    for mlp in model[:2]:
        plan: dict[str, Any] = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
        if sequence:
            plan = {
                "in_proj": ColwiseParallel(input_layouts=Shard(1)),
                "out_proj": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(mlp, mesh, plan)
    if sequence:
        parallelize_module(
            model[0], mesh, PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
        )
        parallelize_module(model[2], mesh, SequenceParallel())


def train(rank: Rank, model: Any, plain: Any, dp: DeviceMesh, shape: tuple[int, ...], *, steps: int = 2) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False) for m in (plain, model)]
    index, group = dp.get_local_rank(), dp.get_group()
    for step in range(steps):
        inputs = batch(rank, step, shape, index=index)
        model(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
        average_gradients(plain, group)
        assert_same(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


@world(2, 4)
@pytest.mark.parametrize("dim", [3, 8])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_trains_as_replicas_do(rank: Rank, dim: int, reshard_after_forward: bool) -> None:
    """Uneven sizes too: the full tensors are put together in the right order."""
    size = rank.world_size
    mesh = rank.mesh((size // 2, 2), ("dp", "tp"))

    def prepare(model: nn.Sequential) -> nn.Sequential:
        tensor_parallel(model, mesh["tp"])
        return model

    pair = rank.pair(
        mlps(dim),
        units=[["0"], ["1"]],
        mesh=mesh["dp"],
        prepare=prepare,
        reshard_after_forward=reshard_after_forward,
    )
    for step in range(2):
        pair.step(rank.batch(step, (3, dim), mesh=mesh["dp"]), set_to_none=step % 2 == 0)
        pair.check()


@world(4)
def test_placements(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = mlps(9)
    tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    first = model[0]
    assert first.in_proj.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert first.in_proj.bias.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert first.out_proj.weight.placements == (Shard(0), Shard(1))
    assert first.out_proj.bias.placements == (Shard(0), Replicate())
    for param in model.parameters():
        assert param.device_mesh.mesh_dim_names == ("dp", "tp")
        assert torch.equal(param.device_mesh.mesh, mesh.mesh)


@world(4)
@pytest.mark.parametrize("p", [1, 2, 3, "inf"])
def test_sequence_parallel_and_the_norm_of_all_gradients(rank: Rank, p: float | str) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    # In float64 and by torch's default tolerance: the gradients of a sum of squares behind a normalisation nearly
    # cancel, and in float32 what is left of them differs by more than that between the kernels of two models of CPU.
    tolerance = {"rtol": 1e-7, "atol": 1e-7}
    model = mlps(6, norm=True).double()
    plain = plain_copy(model)
    tensor_parallel(model, mesh["tp"], sequence=True)
    for mlp in model[:2]:
        fully_shard(mlp, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    inputs = batch(rank, 0, (2, 4, 6), index=mesh["dp"].get_local_rank()).double()
    output = model(inputs)
    full(output).square().sum().backward()
    plain(inputs).square().sum().backward()
    average_gradients(plain, mesh["dp"].get_group())
    assert_same(plain, model, **tolerance)
    ours = clip_grad_norm_(model.parameters(), 0.1, p)
    torch.testing.assert_close(ours, nn.utils.clip_grad_norm_(plain.parameters(), 0.1, float(p)))
    assert_same(plain, model, **tolerance)


@world(4)
def test_pending_sums_are_summed_in_the_reduce_dtype(rank: Rank) -> None:
    """The bias of a normalisation under sequence parallelism sums over the sequence on each rank."""
    mesh = rank.mesh((1, 4), ("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(4))
    parallelize_module(model[0], mesh["tp"], SequenceParallel())
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    inputs = DTensor.from_local(torch.ones(1, 1, 4, device=rank.device), mesh["tp"], [Shard(1)])
    part = torch.full((1, 1, 4), 1.0 if rank.index == 0 else 2.0**-9, device=rank.device)
    weight = DTensor.from_local(part, mesh["tp"], [Shard(1)])
    (model(inputs).float() * weight).sum().backward()
    torch.testing.assert_close(full(model[0].bias.grad).cpu(), torch.full((4,), 1 + 3 * 2.0**-9), rtol=0, atol=0)


@world(4)
def test_hybrid_with_tensor_parallel_of_one(rank: Rank) -> None:
    """Three dimensions on four ranks: (replicate 2, shard 1, tp 2), and (replicate 2, shard 2, tp 1)."""
    for shape in ((2, 1, 2), (2, 2, 1)):
        mesh = rank.mesh(shape, ("replicate", "shard", "tp"))
        model = mlps(5)
        plain = plain_copy(model)
        tensor_parallel(model, mesh["tp"])
        for mlp in model:
            fully_shard(mlp, mesh=mesh["replicate", "shard"])
        fully_shard(model, mesh=mesh["replicate", "shard"])
        assert model[0].in_proj.weight.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")
        data_rank = mesh.get_local_rank("replicate") * shape[1] + mesh.get_local_rank("shard")
        inputs = batch(rank, 0, (3, 5), index=data_rank)
        model(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
        # Equal within the tensor-parallel group, so the average over all ranks is the one over the data.
        average_gradients(plain)
        assert_same(plain, model)


@world(4)
@pytest.mark.parametrize("with_tensor_parallel", [False, True])
def test_stages_of_a_pipeline(rank: Rank, with_tensor_parallel: bool) -> None:
    """Each stage is its own root on its own part of the mesh; the stages' collectives do not meet."""
    shape = (2, 1, 2) if with_tensor_parallel else (2, 2, 1)
    mesh = rank.mesh(shape, ("pp", "dp", "tp"))
    stages = mlps(5)
    model = nn.Sequential(stages[mesh.get_local_rank("pp")])
    plain = plain_copy(model)
    if with_tensor_parallel:
        parallelize_module(model[0], mesh["tp"], {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(rank, model, plain, mesh["dp"], (3, 5))
    for param in model.parameters():
        assert param.device_mesh.mesh_dim_names == (("dp", "tp") if with_tensor_parallel else ("dp",))


@world(4, 8)
def test_stages_that_reshard_to_a_smaller_size(rank: Rank) -> None:
    """Each stage of a pipeline makes smaller groups of its own ranks, at the same time as the other or alone."""
    mesh = rank.mesh((rank.world_size // 4, 4, 1), ("pp", "dp", "tp"))
    stages = mlps(5)
    model = nn.Sequential(stages[mesh.get_local_rank("pp")])
    plain = plain_copy(model)
    dp = mesh["dp"]
    for module in (model[0], model):
        fully_shard(module, mesh=dp, reshard_after_forward=2)
    with torch.no_grad():
        model(batch(rank, 0, (3, 5), index=dp.get_local_rank()))
    shown = dict(model.named_parameters())
    first = 4 * mesh.get_local_rank("pp")
    pairs = [[first, first + 1], [first + 2, first + 3]]
    assert all(param.device_mesh.mesh.tolist() == pairs for param in shown.values())
    for name, original in plain.named_parameters():
        torch.testing.assert_close(full(shown[name].detach()), original.detach(), rtol=0, atol=0)
    for module in (model[0], model):
        module.reshard()  # the optimizer is for the shards of all ranks
    train(rank, model, plain, dp, (3, 5))


@world(4)
def test_a_smaller_mesh_after_forward_is_refused(rank: Rank) -> None:
    mesh = rank.mesh((4, 1), ("dp", "tp"))
    model = mlps(4)
    tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"smaller mesh is not supported for DTensor .*forward=2 in .root."):
        model(batch(rank, 0, (2, 4)))


DIMS = {
    "shard": ((4,), ("dp",), DataParallelMeshDims(shard="dp")),
    "replicate": ((4,), ("dp",), DataParallelMeshDims(replicate="dp")),
    "hybrid": ((2, 2), ("r", "s"), DataParallelMeshDims(shard="s", replicate="r")),
    "shard over two": ((2, 2), ("s", "cp"), DataParallelMeshDims(shard=("s", "cp"))),
    "replicate over two": ((2, 2), ("r", "q"), DataParallelMeshDims(replicate=("r", "q"))),
    "tensor parallel": ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp")),
    "replicas of tensor parallel": ((2, 2), ("dp", "tp"), DataParallelMeshDims(replicate="dp")),
}


@world(4)
@pytest.mark.parametrize("kind", DIMS)
def test_parameters_on_one_mesh_of_all_dimensions(rank: Rank, kind: str) -> None:
    shape, names, dims = DIMS[kind]
    mesh = rank.mesh(shape, names)
    model = mlps(5)
    plain = plain_copy(model)
    for name, module in model.named_modules():
        for param_name, param in list(module._parameters.items()):
            placements = [Replicate() for _ in names]
            if "tp" in names:
                rows = {"in_proj.weight": 0, "in_proj.bias": 0, "out_proj.weight": 1}
                dim = rows.get(f"{name.rsplit('.', 1)[-1]}.{param_name}")
                placements[1] = Replicate() if dim is None else Shard(dim)
            setattr(module, param_name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    for mlp in model:
        fully_shard(mlp, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    data_rank = mesh.get_local_rank("dp") if "tp" in names else rank.index
    for step in range(2):
        inputs = batch(rank, step, (3, 5), index=data_rank)
        spread = DTensor.from_local(inputs, mesh, [Replicate() for _ in names], run_check=False)
        full(model(spread)).square().sum().backward()
        plain(inputs).square().sum().backward()
        average_gradients(plain)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_close(name, full(param.grad), expected.grad)
        for m in (plain, model):
            torch.optim.SGD(m.parameters(), lr=0.1, foreach=False).step()
            m.zero_grad()


@world(2)
def test_wrong_dimensions_are_named(rank: Rank) -> None:
    mesh = rank.mesh((2, 1), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"'cp' not found in mesh.mesh_dim_names"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="cp"))
    with pytest.raises(ValueError, match="Got plain tensor for parameter 'weight'"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP dim 'dp' .* 'weight' but got S"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model.weight = nn.Parameter(distribute_tensor(model.weight.full_tensor().detach(), rank.mesh(), [Replicate()]))
    with pytest.raises(ValueError, match="different mesh objects"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert dist.get_world_size() == 2
