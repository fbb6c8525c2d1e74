"""What settings of communication change within units: contexts, streams, what they wait for, dtypes of reductions."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from fsdp_impl import (
    FSDPMeshInfo,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    share_comm_ctx,
)
from fsdp_impl.common import collectives, streams
from fsdp_impl.per_parameter import communication, options, reduction
from shardproof.harness.judging.numerics import distance
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import MLP, batch, tower


def sharded_tower(rank: Rank) -> tuple[Any, nn.Module]:
    model: Any = tower(4, 2)
    plain = copy.deepcopy(model).to(rank.device)
    for module in (*model[1:], model):
        fully_shard(module, mesh=rank.mesh())
    return model, plain


def check_step(rank: Rank, model: Any, plain: nn.Module, *, step: int = 0) -> None:
    """Compare gradients by the rule of the suites, with a plain copy whose gradients are averaged for an oracle."""
    inputs = batch(rank, step, (3, 4))
    for which in (model, plain):
        which.zero_grad()
        which(inputs).square().sum().backward()
    for (name, expected), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None and param.grad.dtype == param.dtype, name
        dist.all_reduce(expected.grad)
        oracle, actual = expected.grad.div_(rank.world_size).cpu(), param.grad.full_tensor().cpu()
        found = distance(actual, oracle, oracle.double(), magnitude=float(oracle.abs().max()))
        assert not found.is_too_far, f"{name}: {found.sharded_ulps:.3g} ulps from the plain copy"


@world(2)
def test_inputs_of_reductions_are_the_most_of_any_unit(rank: Rank) -> None:
    model, plain = sharded_tower(rank)
    for number in (1, 3):  # before the first forward the root has no units yet
        model.set_reduce_scatter_max_input_buffers(number)
        assert model._unit().comm.max_reduce_inputs == 1
    check_step(rank, model, plain)
    assert model._unit().comm.max_reduce_inputs == 3
    model[1].set_reduce_scatter_max_input_buffers(5)
    assert model._unit().comm.max_reduce_inputs == 5


@world(1)
def test_symmetric_memory_is_for_nccl(rank: Rank) -> None:
    if rank.device.type == "cpu":
        with pytest.raises(NotImplementedError, match="NCCL on cuda, not NCCL on cpu"):
            sharded_tower(rank)[0].set_symm_mem_for_comm()


class _Symmetric(communication.SymmetricMemory):
    """Symmetric memory of a host without it."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self.group, self.backend = group, backend


@world(1)
@pytest.mark.parametrize("first", ["inputs", "memory"])
def test_several_inputs_in_symmetric_memory_are_refused(rank: Rank, first: str) -> None:
    """In either order, and only where reductions use that memory."""
    cuda, group = torch.device("cuda", 0), rank.mesh().get_group()
    rank.monkeypatch.setattr(communication, "SymmetricMemory", _Symmetric)
    for reduces in (False, True):
        chosen = options.GroupOptions(reduce_group=group, force_sum=reduces)
        calls: list[Any] = [
            lambda its=chosen: communication.set_reduce_inputs(its, 2, label="layers.0"),
            lambda its=chosen: communication.use_symmetric_memory(its, group, "NCCL", cuda, label="layers.0"),
        ]
        before, after = calls if first == "inputs" else reversed(calls)
        before()
        if reduces:
            with pytest.raises(ValueError, match=r"max_input_buffers\(>1\) is not supported .* got 2 for layers.0"):
                after()
        else:
            after()


@world(2)
def test_buffers_of_reductions_are_of_their_group(rank: Rank) -> None:
    """Whichever is set first: the memory of the process group, or a process group for reductions."""
    shared = rank.mesh().get_group()
    chosen = options.GroupOptions(reduce_group=shared)
    communication.use_group_memory(chosen, shared, enable=True)
    for enable in (True, False):
        communication.separate_reduce_group(chosen, shared, enable=enable)
        memory: Any = chosen.reduce_scatter
        assert (chosen.reduce_group is shared) != enable
        assert memory._group is chosen.reduce_group


@world(2)
@pytest.mark.parametrize("memory", [False, True])
def test_seams_name_the_unit(rank: Rank, memory: bool) -> None:
    """Whichever memory the buffers are of."""
    model, plain = sharded_tower(rank)
    seen: list[tuple[str, str]] = []

    def noting(name: str) -> Any:
        found = getattr(collectives, name)

        def note(*args: Any, unit: str, **options: Any) -> Any:
            seen.append((name, unit))
            return found(*args, unit=unit, **options)

        return note

    for name in ("gather", "reduce"):
        rank.monkeypatch.setattr(collectives, name, noting(name))
    for module in (*model[1:], model):
        module.set_allocate_memory_from_process_group_for_comm(memory)
    check_step(rank, model, plain)
    assert set(seen) == {(name, unit) for name in ("gather", "reduce") for unit in ("(root)", "1", "2")}


@world(4)
def test_functions_for_one_group_are_refused_on_several_meshes(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("outer", "inner"))
    model: Any = MLP(4)
    part = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh=mesh["inner"], shard_mesh_dim=0))
    fully_shard(model, mesh=rank.mesh(), shard_placement_fn=lambda one: part if one.ndim == 1 else None)
    for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(ValueError, match=rf"{name} is not supported .* several meshes: .*inner"):
            getattr(model, name)(lambda shard: None)


@world(1)
def test_layouts_of_few_subsets_are_kept(rank: Rank) -> None:
    """A router may choose another subset of parameters in each step."""
    model: Any = fully_shard(Choosing(10), mesh=rank.mesh())
    for step in range(100):
        chosen = [number for number in range(10) if step >> number & 1]
        model(batch(rank, step, (2, 4)), chosen or [0]).sum().backward()
    assert 1 < len(model._unit().reducer._layouts) <= reduction._MAX_LAYOUTS


class Choosing(nn.Module):
    """A sum of chosen weights, times its input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(number))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return x * torch.stack([self.weights[number] for number in chosen]).sum(0)


@world(2)
def test_roots_may_share_streams_and_buffers(rank: Rank) -> None:
    pairs = [sharded_tower(rank) for _ in range(2)]
    share_comm_ctx([model for model, _ in pairs])
    for step, (model, plain) in enumerate(pairs):
        check_step(rank, model, plain, step=step)
    units: list[Any] = [
        module._unit() for model, _ in pairs for module in model.modules() if isinstance(module, FSDPModule)
    ]
    assert len({id(unit.comm) for unit in units}) == len({id(unit.group.comm) for unit in units}) == 1
    share_comm_ctx([])
    with pytest.raises(ValueError, match=r"Expects list of FSDPModules but got Linear"):
        share_comm_ctx([pairs[0][0], nn.Linear(1, 1)])


@world(2)
def test_gathers_on_the_current_stream(rank: Rank) -> None:
    model, plain = sharded_tower(rank)
    model._set_unshard_async_op(True)
    for step in range(2):
        check_step(rank, model, plain, step=step)


@world(1)
def test_gathers_wait_once_for_the_given_event(rank: Rank) -> None:
    """Not for what follows it on the current stream. Which wait is asked for shows on the CPU too."""
    model, _ = sharded_tower(rank)
    asked: list[Any] = []
    with rank.monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(streams, "wait", lambda _, event: asked.append(event))
        patch.setattr(streams, "join", lambda *_: asked.append("the current stream"))
        event: Any = object()
        model.set_post_optim_event(event)
        for first in (event, "the current stream"):
            asked.clear()
            model(batch(rank, 0, (3, 4)))
            assert asked[0] is first
            assert asked.count(event) == (first is event)


# Without a reduce dtype in the policy, that of the parameters is asked for at each reduction


@world(1)
def test_a_cast_between_two_steps_decides(rank: Rank) -> None:
    """torch cannot run a model that is cast after its first forward (F-180), so that no case asks."""
    model: Any = fully_shard(nn.Linear(4, 4), mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(torch.float16))
    seen: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda shard: seen.append(shard.dtype))
    dtypes = [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        model.to(dtype)
        model(batch(rank, 0, (2, 4))).sum().backward()
        assert model.weight.grad.dtype == dtype
        model.zero_grad()
    assert seen == dtypes


class Scaled(nn.Module):
    """Multiplies by a weight in float32 and adds a frozen offset in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.offset = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.offset


@world(1)
def test_two_dtypes_are_refused_by_name(rank: Rank) -> None:
    """The first forward would have refused a second dtype that is trainable then; torch ends in autograd's error."""
    model: Any = fully_shard(Scaled(), mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(torch.float16))
    inputs = batch(rank, 0, (4,))
    model(inputs).sum().backward()
    model.offset.requires_grad_(True)
    with pytest.raises(ValueError, match=r"expects one dtype, .*weight.: torch.float32, .offset.: torch.bfloat16"):
        model(inputs).sum().backward()
