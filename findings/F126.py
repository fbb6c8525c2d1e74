"""torch `distribute_tensor`: on a mesh that has its ranks in another order, an uneven tensor is wrong

torch 2.13.0. The rank at place 0 of the mesh [1, 0] holds a shard of the size that it should, but the values are scattered
by the ranks' places in the process group, which sorts them. Silent. Of a tensor that divides evenly the shards are swapped.
Seen by INIT-10 with torchtitan's `simple_fsdp`, which uses it. The reproducer prints `[1.0, 2.0, 0.0, 4.0, 5.0]` for the
tensor 1 to 5. No report of it was found.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["INIT-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '\[1\.0, 2\.0, 0\.0, 4\.0, 5\.0\]'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", [1, 0])
    shard = distribute_tensor(torch.arange(1.0, 6.0), mesh, [Shard(0)])
    print(rank, shard.to_local().tolist(), shard.full_tensor().tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
