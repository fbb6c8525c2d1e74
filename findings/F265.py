"""torch `fully_shard`: a list or dict that user code passes to be filled stays empty, torch 2.11

With autograd a unit whose input requires a gradient is given copies of the lists and dicts among its arguments; what it adds
to them is lost. torch 2.11.0; torch 2.13.0 passes. Seen by INPUTS-1.
The reproducer was not run with torch 2.11.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["INPUTS-1"]
# fixed_in = "2.13"
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d \[\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Filler(nn.Linear):
    def forward(self, x, notes):
        notes.append(1)
        return super().forward(x)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = Filler(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    notes = []
    model(torch.ones(1, 2, requires_grad=True), notes)
    print(rank, notes)  # []
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
