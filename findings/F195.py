"""torch `fully_shard`: two mistakes end in errors that do not name them

A mesh without names beside a DTensor parameter raises "Invariant encountered: value was None when it should not be" while
the model is sharded, and a plain parameter that a script has put in the place of a sharded one raises "'Parameter' object
has no attribute '_local_tensor'" in the next forward. torch 2.13.0. With torch 2.11 a placement that is no `Shard` ends in
"'Replicate' object has no attribute 'dim'". Seen by INIT-5.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# shows = '^\d .*(Invariant encountered: value was None|has no attribute ._local_tensor)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    try:
        fully_shard(model, mesh=DeviceMesh("cpu", range(world)))
    except Exception as error:
        print(rank, type(error), error)
    layer = nn.Linear(4, 4)
    fully_shard(layer)
    layer.weight = nn.Parameter(torch.ones(4, 4))
    try:
        layer(torch.ones(2, 4))
    except Exception as error:
        print(rank, type(error), error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
