"""torch `fully_shard`: a function that `set_all_reduce_hook` refuses is called all the same

On a HSDP mesh `set_all_reduce_hook(hook, stream=...)` raises `ValueError: stream cannot be set when using native HSDP`.
The hook has been set by then, and later backwards call it.

torch 2.13.0. Seen by INIT-5.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`0`: a hook that was refused is not called. It is called once.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule.set_all_reduce_hook",
# ]
# shows = '^\d 1$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model, calls = fully_shard(nn.Linear(2, 2), mesh=mesh), []
    try:
        model.set_all_reduce_hook(calls.append, stream=object())
    except ValueError as error:
        print(rank, error)  # stream cannot be set when using native HSDP
    model(torch.ones(1, 2)).sum().backward()
    print(rank, len(calls))  # 1
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
