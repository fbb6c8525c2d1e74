"""torch `set_optimizer_state_dict` with `FullyShardedDataParallel` on a sub-mesh: ranks without rank 0 cannot load

With `broadcast_from_rank0=True` the optimizer's state is sent within the group of the model by rank 0 of the world, which
other groups do not have: `Global rank 0 is not part of group`. In these groups `get_optimizer_state_dict` saves on the
group's first rank. Seen by CALLS-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^2 Global rank 0 is not part of group'
# related = [
#     "https://github.com/pytorch/pytorch/issues/180449 open: FSDP.optim_state_dict and FSDP.optim_state_dict_to_load called without group in torch.distributed.checkpoint.state_dict",
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
    try:
        state_dict.set_optimizer_state_dict(model, optimizer, state, options=options)
    except ValueError as error:
        print(rank, error, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
