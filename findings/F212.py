"""torch `FullyShardedDataParallel`: batch normalisation in full precision computes in low precision if it is called by keyword

With a compute dtype and a wrapping policy, batch normalisation is a unit of its own without mixed precision, whose input
is cast to float32 and whose output is cast back. What comes by keyword is not cast, nor is what it returns then. torch
2.13.0. Seen by CALLS-10.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d torch\.bfloat16$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)

    class Norm(nn.BatchNorm1d):
        def forward(self, input):
            print(rank, input.dtype)  # float32 by position, bfloat16 by keyword
            return super().forward(input)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.norm = nn.Linear(2, 2), Norm(2)

        def forward(self, x):
            hidden = self.enter(x)
            return self.norm(hidden) + self.norm(input=hidden)

    policy, precision = ModuleWrapPolicy({nn.Linear}), MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(Model(), device_id=torch.device("cpu"), auto_wrap_policy=policy, mixed_precision=precision)
    model(torch.ones(4, 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
