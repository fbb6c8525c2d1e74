"""torch `FullyShardedDataParallel`: of a module in two places a rule wraps the first alone

The second place, of the same parent or of another one, keeps the module itself, whose parameters are shards whenever
its wrapper does not compute: forward raises `mat2 must be a matrix, got 1-D tensor`, and with flat parameters, of which
it keeps views, `setStorage: ... out of bounds for storage of size 0`. Each kind of policy does so. torch 2.13.0. Seen
by WRAPPING-2.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["WRAPPING-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = '^\[.FullyShardedDataParallel., .Tanh., .Linear.\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for originals in (True, False):
        shared = nn.Linear(2, 2)
        model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared))  # two parents
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=originals, device_id=torch.device("cpu")
        )
        if rank == 0:
            print([type(module).__name__ for parent in model.module for module in parent], flush=True)
        try:
            model(torch.ones(1, 2))
        except RuntimeError as error:
            if rank == 0:
                print(error, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
