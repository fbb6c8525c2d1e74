"""torch `GradScaler` with DTensors: ranks step apart where parameters lie on several meshes

All gradients of one dtype are unscaled by one call, and whether one of them is infinite is asked of the ranks of the
first gradient's mesh alone. Experts that are sharded among fewer ranks than all else come first in an optimizer, or a
unit of a smaller mesh does: an infinite gradient on one of the other ranks makes half of them skip the step and lower
the scale. The others step. Silent, and the ranks' parameters differ from then on. `ShardedGradScaler` asks its own
process group, all ranks by default, and is right with DTensors too: the adapters use it where a case has several
meshes. Seen by SCALER-1.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["SCALER-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = '^GradScaler, experts first: \[True, True, False, False\] stepped'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "shard"))
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        for first in ("experts", "router"):
            experts = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh["shard"])
            router = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (world,)))
            parameters = [experts.weight, router.weight]
            optimizer = torch.optim.SGD(parameters if first == "experts" else parameters[::-1], lr=1.0)
            scaling, before = scaler("cpu"), router.weight.to_local().clone()
            x = torch.ones(1, 4)
            loss = router(x).sum() + experts(x * torch.inf if rank == world - 1 else x).sum()
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            stepped = [None] * world
            dist.all_gather_object(stepped, not torch.equal(router.weight.to_local(), before))
            if rank == 0:
                print(f"{scaler.__name__}, {first} first: {stepped} stepped", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
