"""torchtitan `simple_fsdp`: hybrid sharding reduces whole gradients over the replicas

torchtitan 0.3.0. In the mode `hybrid_shard`, gradients are all-reduced over the replicas first, whole, and then reduce-scattered over the
shards. Averaging the shards moves as many times fewer bytes as there are shards. It also sums in another order than
`fully_shard`, which BUFFERS-1 sees at four ranks: the last bit of a gradient differs.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["BUFFERS-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^_c10d_functional::all_reduce\S* \[4, 4\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    model = nn.Linear(4, 4, bias=False)
    data_parallel(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), "hybrid_shard")
    loss = model(torch.ones(1, 4)).sum()
    with profile(record_shapes=True) as seen:
        loss.backward()
    if rank == 0:
        for event in seen.events():
            if event.name.startswith("_c10d_functional::") and "wait" not in event.name:
                print(event.name, event.input_shapes[0])  # all_reduce of [4, 4], then reduce_scatter of [4, 4]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
