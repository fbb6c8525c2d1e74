"""torch `FullyShardedDataParallel` with `NO_SHARD`: a gradient with other strides raises in the next forward

User code may replace a gradient, as by one that it has summed or transposed itself. Where nothing is sharded a gradient
has its parameter's shape, and before the next forward it is copied into the flat one by `view(-1)`, which takes rows
alone: one that lies column by column raises RuntimeError. Shards have one dimension and do not meet it. Seen by
OPTIMIZER-8.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["OPTIMIZER-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^RuntimeError view size is not compatible with input tensor'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(
        nn.Linear(4, 3),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model(torch.ones(2, 4)).sum().backward()
    weight = model.module.weight
    weight.grad = weight.grad.t().contiguous().t()
    try:
        model(torch.ones(2, 4)).sum().backward()
        shown = "trained"
    except RuntimeError as error:
        shown = f"RuntimeError {error}"
    if rank == 0:
        print(shown, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
