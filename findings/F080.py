"""torch `FullyShardedDataParallel`: the error about a differing order names ranks by their places in the group

Where a process group is a part of the world, the ranks that the order validation names are places in the group: another
rank is looked into. So do its warnings. torch 2.13.0. Seen by ORDER-1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["ORDER-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^[23] .*rank 0 is all-gathering'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    options = {"device_id": torch.device("cpu"), "process_group": halves[rank // 2]}
    first, second = (FullyShardedDataParallel(nn.Linear(2, 2), **options) for _ in range(2))
    layers = nn.ModuleList([first, second] if rank % 2 else [second, first])  # two orders of the same units
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), first, second), **options)
    order = [model.module[0], *layers]
    model.module.forward = lambda x: order[2](order[1](order[0](x)))
    try:
        model(torch.ones(1, 2))
    except RuntimeError as error:
        print(rank, error)  # on ranks 2 and 3 too: rank 0 is all-gathering ... while rank 1 ...
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
