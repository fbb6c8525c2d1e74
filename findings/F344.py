"""torch `fully_shard`: reductions with a group of their own average other shards where ranks are in another order

`set_separate_reduce_scatter_group()` makes a new group of the ranks of the all-gather's group. If that group keeps
another order of ranks (`new_group(..., sort_ranks=False)`, or `DeviceMesh(..., preserve_rank_order=True)` of 2.15), the
new one does not, because `new_group` sorts by default: a rank gets the reduced gradient of another rank's shard,
silently. In the program the gradient of row i is i, and rank 1 holds rows 0 and 1.

torch 2.13.0 and 2.15.0. Seen by REDUCTION-11. No report of it was found.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REDUCTION-11"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = "`1 [0.0, 1.0]` and `0 [2.0, 3.0]`, as without the call. The two ranks have each other's gradients."
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._set_separate_reduce_scatter_group",
# ]
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
