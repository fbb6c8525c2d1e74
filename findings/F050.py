"""torch `fully_shard`, `FullyShardedDataParallel`: replicas whose ranks are in different orders average different shards

On a HSDP mesh whose ranks are in another order in one replica than in the other, such as [[3, 1], [0, 2]], ranks 3 and
0 are one replicate group and hold different shards: a rank's shard is its place in the process group, and `new_group`
sorts ranks. The all-reduce then averages gradients of different rows. Nothing is refused and nothing raises. In the
program the gradient of row i is i on every rank, so that a shard is [0, 1] or [2, 3]. `FullyShardedDataParallel` does
the same.

`DeviceMesh.get_local_rank` returns that place too. torch 2.13.0. Seen by INIT-10.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp"]
# requirements = ["INIT-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`[0.0, 1.0]` or `[2.0, 3.0]` on each rank, or an error that refuses the mesh. All ranks print `[1.0, 2.0]`.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_init:_get_mesh_info",
#     "torch.distributed.fsdp._fully_shard._fsdp_common:HSDPMeshInfo",
# ]
# shows = '^\d \[1\.0, 2\.0\]$'
# related = [
#     "https://github.com/pytorch/pytorch/pull/193224 closed: Preserving Custom Rank Layouts in DeviceMesh, a proposal to keep the order of ranks",
#     "https://github.com/pytorch/pytorch/pull/176578 closed: `new_group` can keep the order of ranks",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("replicate", "shard"))
    flat = FullyShardedDataParallel(
        nn.Linear(1, 4, bias=False),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    for model in (flat, fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh)):
        (model(torch.ones(1, 1)) * torch.arange(4.0)).sum().backward()
        (parameter,) = model.parameters()
        print(rank, getattr(parameter.grad, "_local_tensor", parameter.grad).flatten().tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
