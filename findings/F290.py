"""torch `fully_shard`: of a parameter without rows that is cut along its columns no rank has columns

The shard of a (0, 4) parameter on two ranks is (0, 0) instead of (0, 2). The DTensor claims to have the columns, and
`full_tensor()` raises. torch 2.13.0. Seen by PLACEMENT-2.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["PLACEMENT-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
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
    print(rank, model.empty.to_local().shape)  # [0]
    try:
        model.empty.full_tensor()
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
