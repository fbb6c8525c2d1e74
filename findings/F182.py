"""torch `FullyShardedDataParallel`: of a module in two places a rule wraps the first alone

The second place keeps the module itself, whose parameters are shards whenever its wrapper does not compute. torch 2.13.0.
Seen by WRAPPING-2.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["WRAPPING-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d \[.FullyShardedDataParallel., .Tanh., .Linear.\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    policy = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    print(rank, [type(module).__name__ for module in model.module])  # FullyShardedDataParallel, Tanh, Linear
    try:
        model(torch.ones(1, 2))
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
