"""torch `FullyShardedDataParallel.clip_grad_norm_`: the inf-norm never falls where a rank has no gradients

A rank that holds no gradient adds a zero that torch makes once and keeps. For the inf-norm this tensor itself is reduced
in place by a maximum, so that it keeps the norm of the step, and adds it to the next one. All ranks then clip by the
largest norm so far. Seen by CLIPPING-3 with eight ranks, torch 2.11.0 and 2.13.0. The reproducer prints 8.0 twice; the
second norm is 1.0.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CLIPPING-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^(\d) 8\.0\n\1 8\.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    unit = nn.Linear(1, 1, bias=False)  # one element: the second rank has none
    model = FullyShardedDataParallel(unit, device_id=torch.device("cpu"), use_orig_params=True)
    for size in (8.0, 1.0):
        model(torch.full((1, 1), size)).sum().backward()
        print(rank, model.clip_grad_norm_(100.0, float("inf")).item())
        model.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
