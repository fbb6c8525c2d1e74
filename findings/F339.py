"""torch `get_optimizer_state_dict` with `FullyShardedDataParallel` on a sub-mesh: the group's first rank gets nothing, torch 2.11

The full state is collected over the default group, so of two groups only the one that has rank 0 of the world gets it: ranks
2 and 3 hold a model of their own, and rank 2 saves no state. torch 2.11.0; torch 2.13.0 passes. Seen by CALLS-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-7"]
# fixed_in = "2.12"
# reproduces = ["torch 2.11.0 cpu 2026-11-27"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^2 saves the states of 0 parameters'
# related = [
#     "https://github.com/pytorch/pytorch/pull/181261 closed: the group of the model is passed on",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    if mesh.get_local_rank() == 0:
        print(rank, "saves the states of", len(state.get("state", {})), "parameters", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
