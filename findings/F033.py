"""torch `fully_shard`, `FullyShardedDataParallel`: the inf-norm of gradients with a NaN is a number

The inf-norm over ranks is a MAX reduction, and whether the maximum of a NaN and a number is NaN depends on their order
(seen over gloo). With the NaN in the last rank's shard, every rank gets a finite norm: `error_if_nonfinite=True` does
not raise, and gradients with a NaN are clipped by a factor of 1. Without sharding the norm is NaN.
`FullyShardedDataParallel` does the same.

Seen by CLIPPING-8.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp", "torchtitan.simple_fsdp", "fairscale.fsdp", "megatron_fsdp.experimental"]
# requirements = ["CLIPPING-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`nan` on every rank, as `clip_grad_norm_` returns it for the same gradients without sharding.'
# places = [
#     "torch.nn.utils.clip_grad:_get_total_norm",
#     "torch.distributed.tensor._ops._math_ops:_NormPartial",
# ]
# shows = '^\d \w+ 1\.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    x = torch.ones(4, 4)
    x[3] = float("nan")  # of the last row of the weight, which rank 1 holds
    for shard in (fully_shard, FullyShardedDataParallel):
        options = {"mesh": init_device_mesh("cpu", (world,))} if shard is fully_shard else {"device_id": x.device}
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(4, 4))
        model.forward = lambda x, model=model: (x * model.weight).sum()
        sharded = shard(model, **options)
        sharded(x).backward()
        if shard is fully_shard:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")).full_tensor()
        else:
            norm = sharded.clip_grad_norm_(1.0, float("inf"))
        print(rank, shard.__name__, float(norm))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
