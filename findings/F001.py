"""torch `fully_shard`: after resharding to a smaller size that does not divide, parameters are cut in the wrong place

`reshard_after_forward=2` at world 4, a dimension of 5. Between forward and backward `parameters()` shows DTensors over
the mesh (2, 2) with placements (Replicate, Shard(0)). Their local rows are those of the tensor padded for four ranks,
cut in two (0-3 and 4-7), not those that a DTensor of five rows has on two ranks (0-2 and 3-4), so `full_tensor()`
returns wrong rows. Training is not affected. Seen by REGISTRATION-1 with torch 2.13.0, and the same with the fsdp
packages of 2.11.0 and 2.12.1 put into it.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REGISTRATION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
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
