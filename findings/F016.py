"""torch `FullyShardedDataParallel`: replicas of one shard do not average their gradients

On a (replicate, shard) mesh whose shard dimension is one rank, `HYBRID_SHARD` and its ZeRO-2 form switch to `NO_SHARD`,
with a warning, and forget the replicas: gradients are divided by their number and not added. Each rank trains on its
own; silent but for the warning, which does not mention it. Seen by HYBRID-2 ("it equals this rank's own gradient divided
by 4, as when the reduction over the ranks is missing").
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["HYBRID-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^rank \d: (?!1\.5 )\S+ instead of 1\.5'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/154888 open: Potential Bug with HYBRID_SHARD and (n, 1) Device Mesh Falling Back to NO_SHARD",
# ]
# related = [
#     "https://github.com/verl-project/verl/issues/7493 closed: the same met by verl, `fsdp_size=1` silently disables gradient synchronization",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        device_mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard")),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    print(f"rank {rank}: {next(model.parameters()).grad.item()} instead of 1.5")  # 0.5 and 1.0
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
