"""megatron-fsdp: a unit that returns a dict or a dataclass is not gathered for backward

The hook that gathers is put on tensors, and tensors in tuples and lists; in the experimental half, which uses hooks
of modules, on tensors and tuples alone. What a unit returns in another container leads to a backward without
parameters; a class of tuples of one element is made anew from the rows of that element, by torch's hooks of modules.
megatron-fsdp 0.6.1. Seen by AUTOGRAD-3, -6, -13 and -16, and INIT-5.
"""

# /// finding
# implementations = ["megatron_fsdp", "megatron_fsdp.experimental"]
# requirements = ["AUTOGRAD-3", "AUTOGRAD-6", "AUTOGRAD-13", "AUTOGRAD-16", "INIT-5"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^RuntimeError: setStorage: .*storage of size 0'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model
from torch import nn


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return {"out": self.linear(x.relu())}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.unit = nn.Linear(4, 4), Unit()

    def forward(self, x):
        return self.unit(self.entry(x))["out"]


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard_model(Model().cuda(), fsdp_unit_modules=[Unit])
    model(torch.ones(1, 4, device="cuda")).sum().backward()  # RuntimeError: setStorage: ... storage of size 0
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
