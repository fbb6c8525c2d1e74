"""torch `fully_shard` before 2.13: on a device, a root's forward without inputs raises IndexError

`FSDPState._root_pre_forward` moves the root's inputs to the device by `_to_kwargs(args, kwargs, ...)` and takes the
first element of what it returns, which is an empty tuple where there are neither positional nor keyword arguments:
`args, kwargs = args_tuple[0], kwargs_tuple[0]`, `IndexError: tuple index out of range`. On the CPU nothing is moved,
and the case passes. So it stands in the sources of 2.11.0, 2.12.0 and 2.12.1; 2.13.0 has the fix
(pytorch/pytorch#183943). Seen by TRAINING-9 with torch 2.11.0 over NCCL on H200s, where only the case was run and not
the reproducer. The same statement raises on the CPU if it is reached there, with the fsdp packages of 2.11.0 and
2.12.1.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["TRAINING-9"]
# fixed_in = "2.13"
# gpus = 1
# shows = '^IndexError: tuple index out of range'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/183943 closed: Fix FSDP2 no-input forward handling",
# ]
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class NoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self):
        return self.weight.sum()


dist.init_process_group("nccl", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
print(fully_shard(NoInputs().cuda())())
dist.destroy_process_group()
