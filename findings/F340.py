"""torch `clip_grad_norm_`: gradients on several meshes raise, as those of experts next to all others do

The norms of single gradients are stacked, each a DTensor on the mesh of its gradient, and a stack wants one mesh. Experts
that expert parallelism has divided lie on (data-parallel, expert-parallel), all else on the data-parallel mesh of all
ranks, whether units are sharded over meshes of their own or `shard_placement_fn` gives parameters of one unit theirs. Seen
by EXPERTS-4.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["EXPERTS-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27", "torch 2.15.0 cpu 2026-12-01"]
# shows = '^RuntimeError: All operands in aten\.stack\.default must have the same mesh'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/180346 open: clip_grad_norm_ fails when per-parameter norms come from different DeviceMesh objects",
#     "https://github.com/pytorch/pytorch/pull/180501 closed: Fix clip_grad_norm_ failure with mixed DeviceMesh DTensor norms, a proposal",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep"))
    experts, model = nn.Linear(4, 4, bias=False), nn.Sequential(nn.Linear(4, 4))
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["dp"])
    fully_shard(model)
    parameters = [*experts.parameters(), *model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        print("the norm is", nn.utils.clip_grad_norm_(parameters, 1.0), flush=True)
    except RuntimeError as error:
        print(f"RuntimeError: {str(error).splitlines()[0]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
