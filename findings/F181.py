"""torch `FullyShardedDataParallel`: a tensor that replaces a flat parameter is dropped

The next forward computes with the flat parameter of before, also where the new one has another size. F-178 is the same of
`fully_shard`. torch 2.13.0. Seen by TRAINING-12.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["TRAINING-12"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^(\d) (tensor.*)\n\1 \2\n\1 \2$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    print(rank, model(torch.ones(1, 2)))
    for size in (3, 2):  # another size is not refused, and zeros of the same size are not used
        model.module._flat_param = nn.Parameter(torch.zeros(size))
        print(rank, model(torch.ones(1, 2)))  # as before
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
