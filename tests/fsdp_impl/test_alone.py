"""What a single rank can show of fully_shard: refusals, classes, and the layout of memory."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_impl
from fsdp_impl import fully_shard


@pytest.fixture(autouse=True, scope="module")
def world_of_one() -> Iterator[None]:
    """On the CPU, also where the host has GPUs: without a mesh those are what modules are moved to."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def batch() -> torch.Tensor:
    return torch.ones(2, 4)


def test_the_class_is_swapped_for_a_subclass_of_both() -> None:
    module = two_layers()
    fully_shard(module)
    assert type(module).__name__ == "FSDPSequential"
    assert isinstance(module, nn.Sequential)
    assert isinstance(module, fsdp_impl.FSDPModule)
    assert type(module[0]) is nn.Linear
    assert type(module[:1]) is nn.Sequential


def run_child_first(module: nn.Sequential) -> None:
    fully_shard(module[0])
    fully_shard(module)
    module[0](batch())


def make_root_of_two(module: nn.Sequential) -> None:
    fully_shard([module[0], module[1]])


@pytest.mark.parametrize(
    "prepare, text",
    [
        (run_child_first, "FSDP state has already been lazily initialized for 0\n.*root module first"),
        (make_root_of_two, "requires a single root module but got "),
    ],
)
def test_what_only_the_first_forward_can_see(prepare: Callable[[nn.Sequential], None], text: str) -> None:
    module = two_layers()
    prepare(module)
    with pytest.raises(RuntimeError, match=text):
        module(batch())


def test_the_mesh_of_a_parameter_may_be_of_any_class_and_is_one_to_shard_over() -> None:
    mesh, module = init_device_mesh("cpu", (1,), mesh_dim_names=("alone",)), nn.Linear(4, 4)
    info = SimpleNamespace(mesh=mesh, shard_mesh_dim=0, replicate_mesh_dim=None)
    result = SimpleNamespace(placement=None, mesh_info=info)
    fully_shard(module, shard_placement_fn=lambda param: result if param is module.bias else None)
    assert [param.device_mesh == mesh for param in module.parameters()] == [False, True]
    wrong = fsdp_impl.ShardPlacementResult(None, fsdp_impl.FSDPMeshInfo(mesh))
    with pytest.raises(ValueError, match="a mesh for parameter weight should be"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda param: wrong)


def test_a_groups_shards_share_one_storage_and_so_do_its_gradients() -> None:
    module = two_layers()
    fully_shard(module)
    module(batch()).sum().backward()
    params = list(module.parameters())
    assert len({param.to_local().untyped_storage().data_ptr() for param in params}) == 1
    assert len({param.grad.to_local().untyped_storage().data_ptr() for param in params}) == 1


def test_tensors_that_were_swapped_out_keep_their_values() -> None:
    module = two_layers()
    fully_shard(module)
    averages = [nn.Parameter(param.detach().clone() + 1) for param in module.parameters()]
    before = [param.to_local().clone() for param in module.parameters()]
    for param, average in zip(module.parameters(), averages, strict=True):
        torch.utils.swap_tensors(param, average)
    with torch.no_grad():
        module(batch())
    for swapped_out, value in zip(averages, before, strict=True):
        assert torch.equal(swapped_out.to_local(), value)


def test_a_reshard_drops_a_pending_unshard_so_that_nothing_stale_is_used() -> None:
    module = nn.Linear(4, 4)
    fully_shard(module)
    module.unshard(async_op=True)
    module.reshard()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    assert torch.equal(module(batch()), torch.zeros(2, 4))


def test_what_was_gathered_is_filled_again_without_autograd() -> None:
    """By a hook that does not switch autograd off itself, as hooks for torch must, and those of the suites do."""

    def after(outputs: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        return (outputs[0].clone(), ()) if out is None else out.copy_(outputs[0])

    module: Any = nn.Linear(4, 4)
    fully_shard(module)
    shard = module.weight._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = lambda mesh: ((shard,), None), after
    for _ in range(2):
        module(batch()).sum().backward()
