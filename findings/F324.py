"""torch FSDP1: where nothing is sharded, a unit that backward prefetches and does not reach loses its original parameters

With `NO_SHARD` and `use_orig_params=True`, a backward that does not use a unit leaves it as backward's prefetch made it:
`parameters()` of the unit is empty, and it trains no more.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["AUTOGRAD-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^2 parameters before, 0 after'
# unlisted = "cases leave out units in backward only where they are sharded"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


class Heads(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x):
        return self.one(x), self.other(x)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    one, other = (FullyShardedDataParallel(nn.Linear(2, 2), **options) for _ in range(2))
    model = FullyShardedDataParallel(Heads(one, other), **options)
    for both in (True, False):
        before = len(list(one.parameters()))
        first, second = model(torch.ones(1, 2))
        (first.sum() + second.sum() if both else second.sum()).backward()
    print(f"{before} parameters before, {len(list(one.parameters()))} after", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
