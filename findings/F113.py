"""torch `DistributedDataParallel`: small float16 gradients are lost in the average

DDP divides by the number of ranks before it sums, so that what is below the smallest float16 times that number is zero
although the average is not. Dividing in part before and in part after, as both `fully_shard` and
`FullyShardedDataParallel` do, loses less. `replicate` has it from DDP. torch 2.13.0. Seen by PRECISION-4 on four ranks,
at the gradients. The reproducer prints 0.0 instead of 5.96e-08.
"""

# /// finding
# implementations = ["torch.replicate", "ddp"]
# requirements = ["PRECISION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d 0\.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False, dtype=torch.float16))
    model(torch.full((1, 1), 2.0**-24, dtype=torch.float16)).sum().backward()
    print(rank, model.module.weight.grad.item())  # 2**-24 = 5.96e-08 on every rank, and so in the average; it is 0.0
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
