"""torch `FullyShardedDataParallel`: what an evaluation has left gathered is used after a cast

An evaluation leaves the root's own parameters gathered. A cast of the model changes the shards, and the next forward
still uses what was gathered before. torch 2.13.0. Seen by TRAINING-5.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["TRAINING-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^(\d) (tensor.*)\n\1 (?!\2$)tensor'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
        with torch.no_grad():
            if evaluates:
                model(torch.ones(1, 2))
            model.bfloat16().float()
            print(rank, model(torch.ones(1, 2)))  # the second is not rounded
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
