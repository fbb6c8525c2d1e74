"""torch `fully_shard`: after resharding to a smaller size that does not divide, parameters are cut in the wrong place

With `reshard_after_forward=2` on 4 ranks and a parameter whose first dimension does not divide (here 5 rows), the
parameters that the module registers between forward and backward are DTensors with placements (Replicate, Shard(0)) on
a (2, 2) mesh. Their local tensors hold the rows of the parameter padded for 4 ranks and then halved (rows 0-3 and 4-7),
and not the rows that DTensor assigns to 2 shards of 5 rows (0-2 and 3-4). `full_tensor()`, and whatever else reads
these DTensors, returns wrong rows without an error. Training is not affected.

Seen by REGISTRATION-1 with torch 2.13.0, and the same with the fsdp packages of 2.11.0 and 2.12.1 put into it.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REGISTRATION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`full_tensor()` returns the original rows: five times `False`.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_sharded_post_forward",
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_sharded_post_forward_dtensor",
# ]
# shows = '^tensor\(.*True'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, bias=False))
    original = model[0].weight.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=2)
    model(torch.randn(2, 3))
    full = model[0].weight.full_tensor()
    if rank == 0:
        print((full != original).any(dim=1))  # rows 3 and 4 are wrong
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
