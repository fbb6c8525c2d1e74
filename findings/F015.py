"""torch `DistributedDataParallel` over gloo at the debug level DETAIL: a segmentation fault

In `_ddp_init_helper`, when it logs how it was made; torch 2.13.0. Cases at that level have the other baseline. Seen by
ORDER-4.
"""

# /// finding
# implementations = ["ddp"]
# requirements = ["ORDER-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^torch\.multiprocessing\.spawn\.ProcessExitedException: process \d terminated with signal SIGSEGV'
# ///

import os, tempfile, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn


def main(rank, world, path):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)  # process 0 terminated with signal SIGSEGV
