"""fairscale `ShardedDataParallel`: a second backward without `no_sync` adds gradients that were reduced before

On the other ranks than the owner the buffers keep what the reduction left there, which the next reduction adds once
more. DDP allows such backwards. fairscale 0.4.13. Seen by ACCUMULATION-1 and -6 with four ranks.
"""

# /// finding
# implementations = ["fairscale.sdp"]
# requirements = ["ACCUMULATION-1", "ACCUMULATION-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["fairscale==0.4.13"]
# shows = '^\[1\.5, 1\.5\]\n(?!\[3\.0, 3\.0\])'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(2, 2)
    optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(model, optimizer)
    for _ in range(2):
        (model(torch.ones(1, 2)).sum() * rank).backward()
        if rank == 1:  # it updates the bias
            print(model.module.bias.grad.tolist())  # [1.5, 1.5], then not [3.0, 3.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
