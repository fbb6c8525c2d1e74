"""torch `fully_shard`: of a parameter without rows that is cut along its columns no rank has columns

A parameter of shape (0, 4) with `shard_placement_fn` returning `Shard(1)`: the local shard on each of two ranks is (0,
0) instead of (0, 2). The DTensor claims to have 4 columns, and `full_tensor()` raises.

torch 2.13.0. Seen by PLACEMENT-2.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["PLACEMENT-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = '`torch.Size([0, 2])` on both ranks, and `full_tensor()` of shape (0, 4).'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_common:_get_dim_chunked_size",
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._init_sharded_param",
# ]
# shows = '^\d torch\.Size\(\[0(, 0)?\]\)$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=lambda _: Shard(1))
    print(rank, model.empty.to_local().shape)  # (0, 0), and not (0, 2)
    try:
        model.empty.full_tensor()
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
