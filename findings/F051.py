"""torch `FullyShardedDataParallel`: a mesh of three dimensions is taken for its first

Without a hybrid strategy the ranks are those of the mesh's first dimension, however many it has, and gradients of the
others are not averaged. Here that is one rank, so that nothing is sharded. torch 2.13.0. Seen by INIT-5.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'ShardingStrategy\.NO_SHARD \[torch\.Size\(\[20\]\)\]'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/161776 open: FSDP&device_mesh Mesh_dim_names in init_device_mesh not work, the same of a mesh of two dimensions",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (1, 1, 2))
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu"))
    print(rank, model.sharding_strategy, [parameter.shape for parameter in model.parameters()])  # NO_SHARD, [20]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
