"""Writes states of two ranks into a folder, as the libraries do; run by torchrun, for tests of their readers."""

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))


def trained(sharded, seed):
    optimizer = torch.optim.AdamW(sharded.parameters())
    torch.manual_seed(seed)
    sharded(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return optimizer


def full(state):
    """The full tensors of a state of DTensors or ShardedTensors, gathered by all ranks."""
    found = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            found[name] = value.full_tensor()
        elif isinstance(value, ShardedTensor):
            found[name] = torch.empty(value.size())
            value.gather(0, found[name] if dist.get_rank() == 0 else None)
    return found


def main(folder):
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for name in ("fsdp2", "fsdp1", "verl"):
        (folder / name).mkdir(exist_ok=True)
    truth = {}

    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    optimizer = trained(fully_shard(sharded, mesh=mesh), rank)
    values = torch.arange(15.0).view(3, 5)
    own = {"w": distribute_tensor(values, mesh, [Shard(1)]), "rank": rank, "same": torch.ones(2)}
    for name, shape, placements in (
        ("replicas", (2, 1), [Replicate(), Shard(0)]),
        ("inner", (1, 2), [Replicate(), Shard(1)]),
        ("both", (2, 1), [Shard(0), Shard(0)]),
    ):
        own[name] = distribute_tensor(values, init_device_mesh("cpu", shape), placements)
    strided = [_StridedShard(0, split_factor=2), Shard(1)]  # as rows 0 and 2 of four, and 1 and 3
    grid = torch.arange(12.0).view(4, 3)
    size = {"shape": grid.shape, "stride": grid.stride()}
    two = init_device_mesh("cpu", (2, 1))
    own["strided"] = DTensor.from_local(grid[rank::2].clone(), two, strided, run_check=False, **size)
    own["tied"] = own["both"]
    torch.save({"model": sharded.state_dict(), "own": own}, folder / f"fsdp2/rank_{rank}.pt")
    torch.save(sharded.state_dict(), folder / f"verl/model_world_size_2_rank_{rank}.pt")
    torch.save({"step": 3}, folder / f"verl/extra_state_world_size_2_rank_{rank}.pt")
    truth["fsdp2"] = {f"model.{name}": value for name, value in full(sharded.state_dict()).items()}
    truth["fsdp2"] |= {f"own.{name}": values for name in ("w", "replicas", "inner", "both", "tied")}
    truth["fsdp2"]["own.strided"] = grid

    state, of_optimizer = get_state_dict(sharded, optimizer)
    plain = {
        "step": 7,
        "note": "text",
        "rates": [0.1, 0.2],
        "pair": (1, None),
        "rng": torch.arange(9, dtype=torch.uint8),
    }
    dcp.save({"model": state, "optim": of_optimizer, **plain, "object": Path("x"), "other": Other()},
             checkpoint_id=folder / "dcp")  # fmt: skip
    truth["dcp"] = {f"model.{name}": value for name, value in full(state).items()}
    for name, values in of_optimizer["state"].items():
        truth["dcp"] |= {f"optim.state.{name}.{key}": value for key, value in full(values).items()}

    wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = trained(wrapped, rank)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        state, of_optimizer = wrapped.state_dict(), FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)
    torch.save({"model": state, "optim": of_optimizer}, folder / f"fsdp1/part{rank}.pt")
    truth["fsdp1"] = {f"model.{name}": value for name, value in full(state).items()}
    if rank == 0:
        (folder / "truth.pickle").write_bytes(pickle.dumps(truth))
    dist.destroy_process_group()


class Other:
    """An object of a user's class."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
