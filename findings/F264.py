"""torch `FullyShardedDataParallel`: what the first forward refuses, the second does not

Units that differ in an option that all must share are refused in the first forward with a ValueError. The second runs, with
units that have no root. torch 2.13.0. Seen by INIT-5.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d torch\.Size'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    inner = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=False)
    model = FSDP(nn.Sequential(inner, nn.Linear(2, 2)), device_id=torch.device("cpu"), use_orig_params=True)
    for _ in range(2):
        try:
            print(rank, model(torch.ones(1, 2)).shape)  # the second time
        except ValueError as error:
            print(rank, error)  # the first time
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
