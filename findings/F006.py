"""torch `fully_shard`: two pipeline stages that reshard to a smaller size make groups of one name

`fully_shard(..., reshard_after_forward=2)` on the four data-parallel ranks of each of two pipeline stages. Each stage
makes a post-forward `DeviceMesh` of its own ranks. The process groups of that mesh are named by a counter, so that the
groups of both stages get the same names and meet in the store: over gloo, ranks stay in the rendezvous inside
`fully_shard`, or a later `full_tensor()` raises `Connection closed by peer` or returns wrong rows, depending on timing.

So the capability `reshard-a-part`, which the case of COLLECTIVES-5 for such meshes needs, is not declared. It was found
with a test of the reference, which had the same fault and showed wrong rows too. With NCCL it was not tried. Of five
runs of the reproducer and its variants none ended well on all ranks.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COLLECTIVES-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "hang"
# right = 'All 8 ranks print `0 of 8 rows are wrong`.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_init:_get_post_forward_mesh_info",
# ]
# shows = '[1-8] of 8 rows are wrong|Connection closed by peer|^time limit$'
# ///

import datetime, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=20)
    )
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(mesh.get_local_rank("pp"))
    model = nn.Sequential(nn.Linear(3, 8, bias=False))
    original = model[0].weight.detach().clone()
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
    try:
        model(torch.randn(2, 3))
        full = model[0].weight.full_tensor()
        print(f"rank {rank}: {int((full != original).any(dim=1).sum())} of 8 rows are wrong\n", end="", flush=True)
    except RuntimeError as error:
        print(f"rank {rank}: {str(error)[:60]}\n", end="", flush=True)


if __name__ == "__main__":
    mp.start_processes(main, (8, tempfile.mktemp()), nprocs=8, start_method="fork")
