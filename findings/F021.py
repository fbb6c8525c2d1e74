"""torch `fully_shard`: a deferred all-reduce loses parameters that the last microbatch does not use

On a (replicate, shard) mesh with `set_requires_all_reduce(False)` for the first microbatches, each group keeps its
reduce-scattered shards until a backward that all-reduces. If the unit does not run in that microbatch, `post_backward`
returns early because it has no new gradients: the kept shards are neither all-reduced nor put into `.grad`, and the
parameters do not move. If the unit runs but uses other parameters, `partial_reduce_output += reduce_output` adds
buffers of two layouts: it raises if their sizes differ, and otherwise adds gradients of different parameters. Seen by
ACCUMULATION-7.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["ACCUMULATION-7"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-25"]
# shows = '^\[False, True\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, branch):
        return self.branches[branch](x)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Branches()
    for branch in model.branches:
        fully_shard(branch, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for branch in (0, 1):
        model.set_requires_all_reduce(branch == 1)
        model(torch.randn(2, 4), branch).sum().backward()
    if rank == 0:
        print([branch.weight.grad is not None for branch in model.branches])  # [False, True]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
