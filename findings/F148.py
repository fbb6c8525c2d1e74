"""fairscale `FullyShardedDataParallel`: backward raises if a unit or one of its outputs is not used

The states of all wrappers are checked at its end, "expected to be in states [BACKWARD_POST]"; a unit that did not run
has no buffers to free. Several units that are recomputed together by saved-tensor hooks raise too, or are not gathered
for backward. fairscale 0.4.13. Seen by AUTOGRAD-1, -2, -6 and -11, and RECOMPUTATION-4; the adapter does not claim unused units
and outputs.
"""

# /// finding
# implementations = ["fairscale.fsdp"]
# requirements = ["AUTOGRAD-1", "AUTOGRAD-2", "AUTOGRAD-6", "AUTOGRAD-11", "RECOMPUTATION-4"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["fairscale==0.4.13"]
# shows = '^ValueError: expected to be in states'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import FullyShardedDataParallel
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = FullyShardedDataParallel(nn.Linear(2, 2)), FullyShardedDataParallel(nn.Linear(2, 2))
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        return self.one(x), self.out(self.other(x))


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(Heads().cuda())
    model(torch.ones(1, 2, device="cuda"))[0].sum().backward()  # ValueError: expected to be in states ...
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
