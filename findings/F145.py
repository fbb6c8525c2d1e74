"""megatron-fsdp experimental: a parameter of a unit that gets no gradient makes backward raise, or nothing reduce

A unit is reduced and freed once the hooks of all its parameters have run. If the loss leaves out one of a unit's
outputs, "Missing gradient" is raised; a parameter whose hook does not run keeps the unit gathered, with the values
before the step, as do frozen parameters. Units may be freed before their own hooks have run, and what is refused is
not named. megatron-fsdp 0.6.1. Seen by AUTOGRAD-1, -6 and -15, EVALUATION-2, FROZEN-1, INIT-5, MEMORY-3, OPTIMIZER-2
and RANDOM-1. The reproducer raises.
"""

# /// finding
# implementations = ["megatron_fsdp.experimental"]
# requirements = ["AUTOGRAD-1", "AUTOGRAD-6", "AUTOGRAD-15", "EVALUATION-2", "FROZEN-1", "INIT-5", "MEMORY-3", "OPTIMIZER-2", "RANDOM-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\w+: .*Missing gradient'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp.experimental import Flat, Placements, fully_shard
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.one(x), self.other(x)


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model, mesh = Heads().cuda(), dist.device_mesh.init_device_mesh("cuda", (world,))
    fully_shard(model, mesh, Placements([0], [Flat()], [Flat()], [Flat()]))
    model(torch.ones(1, 2, device="cuda"))[0].sum().backward()
    print(rank, [p.grad is None for p in model.parameters()], type(model.one.weight).__name__)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
