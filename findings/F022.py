"""torch `FullyShardedDataParallel`: a unit that only ran inside `no_sync` makes the last backward raise

A unit that ran in a microbatch inside `no_sync`, and not in the one after it that reduces, holds an unsharded gradient
that no post-backward reduces. The end of that backward raises `All sharded parameters that received a gradient in the
post-backward should use _saved_grad_shard`. Seen by ACCUMULATION-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["ACCUMULATION-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^AssertionError: All sharded parameters that received a gradient in the post-backward'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(FullyShardedDataParallel(nn.Linear(4, 4), **OPTIONS) for _ in range(2))

    def forward(self, x, branch):
        return self.branches[branch](x)


OPTIONS = {"device_id": torch.device("cpu"), "use_orig_params": True}


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(Branches(), **OPTIONS)
    with model.no_sync():
        model(torch.randn(2, 4), 0).sum().backward()
    model(torch.randn(2, 4), 1).sum().backward()  # AssertionError: All sharded parameters that received a gradient ...
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
