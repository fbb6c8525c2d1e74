"""torch FSDP1 without a mesh: sharded checkpoints cannot be saved in the background, nor always loaded

Without `device_mesh` the sharded state dicts have ShardedTensors in place of DTensors. `async_save` raises: its copy
to the CPU asks them for `data_ptr`. `load` raises `Missing key in checkpoint state_dict` for something that the
checkpoint has, on a rank that holds no part of some parameter and so has no state of it: the checkpoint is then taken
for an old one, whose names are flattened in another way. accelerate passes no mesh to FSDP1. torch 2.11.0 and 2.13.0.
Seen by STATE-2, DETERMINISM-2 and RESUME-4.
"""

# /// finding
# implementations = ["accelerate.fsdp1"]
# requirements = ["STATE-2", "DETERMINISM-2", "RESUME-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^\d False load: .*Missing key.* async_save: torch function'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint import async_save, load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def error_of(function):
    try:
        function()
        return "works"
    except BaseException as error:
        return str(error).splitlines()[-1][:60]


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for has_mesh in (True, False):
        options = {"device_mesh": init_device_mesh("cpu", (world,))} if has_mesh else {}
        model = FullyShardedDataParallel(
            nn.Linear(5, 1), device_id=torch.device("cpu"), use_orig_params=True, **options
        )
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optimizer": model.optim_state_dict(model, optimizer)}
        save(state, checkpoint_id=f"{path}{has_mesh}")
        loads = error_of(lambda: load(state, checkpoint_id=f"{path}{has_mesh}"))
        saves = error_of(lambda: async_save(state, checkpoint_id=f"{path}{has_mesh}later").result())
        print(rank, has_mesh, "load:", loads, "async_save:", saves)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
