"""megatron-fsdp: a unit is given copies of lists and dicts, and what it adds to them is lost

Where an input of a unit requires a gradient, all its arguments are taken apart and put together anew, lists and dicts
as well. A unit that appends to its caller's list, as those do that collect auxiliary losses, appends to a copy.
Silent. megatron-fsdp 0.6.1. Seen by INPUTS-1. The script prints how many entries the caller finds: 2 of the plain
model, and 1 of the sharded one.
"""

# /// finding
# implementations = ["megatron_fsdp"]
# requirements = ["INPUTS-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-27"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d plain 2 sharded [01]$'
# ///

import copy, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model
from torch import nn


class Unit(nn.Linear):
    def forward(self, x, found):
        found.append(x.sum())
        return super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Unit(4, 4), Unit(4, 4)

    def forward(self, x):
        found = []
        self.second(self.first(x, found), found)
        return len(found)


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model, x = Model().cuda(), torch.ones(1, 4, device="cuda")
    sharded = fully_shard_model(copy.deepcopy(model), fsdp_unit_modules=[Unit], zero_dp_strategy=3)
    print(rank, "plain", model(x), "sharded", sharded(x))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
