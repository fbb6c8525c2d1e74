"""torch `fully_shard`, `FullyShardedDataParallel`: the inf-norm of gradients with a NaN is a number

Over the ranks the inf-norm is a maximum, and whether a maximum of a NaN and a number is NaN depends on their order. With
the NaN on the last rank every rank returns a finite norm, and `error_if_nonfinite` does not raise. Seen by CLIPPING-8. The
reproducer prints 1.0.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp", "torchtitan.simple_fsdp", "fairscale.fsdp", "megatron_fsdp.experimental"]
# requirements = ["CLIPPING-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
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
