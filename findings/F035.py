"""torch `FullyShardedDataParallel`: a dataclass with fields that the constructor does not take is refused as output

Where an output is a dataclass, torch makes a copy by `dataclasses.replace`, which has no field with `init=False` that was
set later, and then reads all fields of the copy: AttributeError. A field that `__post_init__` sets is there, and is refused
with a ValueError (AUTOGRAD-3). Seen by AUTOGRAD-6. The reproducer prints the error.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["AUTOGRAD-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d .Output. object has no attribute .second.'
# related = [
#     "https://github.com/pytorch/pytorch/pull/135067 closed: the change that copies dataclasses by `dataclasses.replace`",
# ]
# ///

import dataclasses, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


@dataclasses.dataclass
class Output:
    first: torch.Tensor
    second: torch.Tensor = dataclasses.field(init=False)


class Unit(nn.Linear):
    def forward(self, x):
        output = Output(super().forward(x))
        output.second = output.first * 2
        return output


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(Unit(4, 4), device_id=torch.device("cpu"))
    try:
        print(rank, model(torch.randn(2, 4)).second)
    except AttributeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
