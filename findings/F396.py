"""torch `FullyShardedDataParallel` with `SHARD_GRAD_OP`: what a script does to gradients before backward is lost

With original parameters, between forward and backward: FULL_SHARD adds to a gradient that user code has set, scaled or
dropped there, and SHARD_GRAD_OP, which has skipped its sharded views until then, also skips the check for new
gradients. The backward adds to the old one, without a word. Seen by OPTIMIZER-8.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["OPTIMIZER-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^FULL_SHARD 12\.0 SHARD_GRAD_OP 2\.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


def gradient(strategy):
    model = FSDP(
        nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    weight = model.module.weight
    output = model(torch.ones(2, 4))
    weight.grad = torch.full_like(weight, 10.0)
    output.sum().backward()
    return weight.grad.max().item()


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    found = [f"{strategy} {gradient(strategy)}" for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")]
    if rank == 0:
        print(*found, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
