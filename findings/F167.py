"""torch 2.11 `fully_shard`, `replicate`: a list of modules that has a forward is refused, mended in 2.13

A subclass of `nn.ModuleList` or `nn.ModuleDict` with a forward of its own gets "fully_shard does not support containers that do not
implement forward". torch 2.13 looks whether there is a forward. Seen by TRAINING-1 on two H200s with torch 2.11.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["TRAINING-1"]
# fixed_in = "2.13"
# reproduces = ["torch 2.11.0 cpu 2026-11-23"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^ValueError: .*does not support containers'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/167856 open: the same of `nn.ModuleDict`",
#     "https://github.com/pytorch/pytorch/pull/175033 closed: allows what has a forward of its own",
# ]
# ///

import tempfile, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Chain(nn.ModuleList):
    def forward(self, x):
        for module in self:
            x = module(x)
        return x


dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
fully_shard(Chain([nn.Linear(2, 2)]), mesh=init_device_mesh("cpu", (1,)))  # ValueError with torch 2.11
dist.destroy_process_group()
