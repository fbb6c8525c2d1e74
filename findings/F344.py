"""torch `fully_shard`: reductions with a group of their own average other shards where ranks are in another order

`set_separate_reduce_scatter_group` makes a group of the ranks of the gathers' group, which `new_group` sorts. Where those
are in another order, as `DeviceMesh(..., preserve_rank_order=True)` of torch 2.15 or `new_group(..., sort_ranks=False)` of
torch 2.13 keep it, a rank gets the averaged gradient of another rank's shard. Silent. torch 2.13.0 and 2.15.0. Seen by
REDUCTION-11. In the reproducer the gradient of row i is i: rank 1 holds rows 0 and 1, whose gradients are 0 and 1; it prints
`1 [2.0, 3.0]`. No report of it was found.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REDUCTION-11"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27", "torch 2.15.0 cpu 2026-11-27"]
# shows = '^1 \[2\.0, 3\.0\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = DeviceMesh.from_group(dist.new_group([1, 0], sort_ranks=False), "cpu")
    model = fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh)
    model.set_separate_reduce_scatter_group()
    (model(torch.ones(1, 1)) * torch.arange(4.0)).sum().backward()
    print(rank, model.weight.grad.to_local().flatten().tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
