"""torch `FullyShardedDataParallel`: a cast between two microbatches raises

After a backward inside `no_sync` the parameters have unsharded gradients. The next forward after `.to()`, `.double()` and
the like takes them for sharded ones and raises. torch 2.13.0. Seen by TRAINING-5. The reproducer ends with
"Expects tensor to be sharded with size".
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["TRAINING-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^AssertionError: Expects tensor to be sharded with size'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    model.double().float()
    model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
