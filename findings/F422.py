"""torch `FullyShardedDataParallel`: a unit that is frozen after a forward whose output was dropped makes backward raise

A forward with autograd registers a post-backward hook of each trained unit, which the end of a backward removes. If no
backward comes, as where a loss is printed and dropped, and user code freezes a unit then, the end of the next backward
finds a hook of another kind than a frozen unit has and raises `Invalid: _post_backward_hook_state`. Without the dropped
forward the same freeze works. torch 2.13.0. Seen by DRAWN-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["DRAWN-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30", "torch 2.15.0 cpu 2026-11-30"]
# shows = '^with a dropped output Invalid: '
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def wrapped(module):
    return FSDP(module, use_orig_params=True, device_id=torch.device("cpu"))


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    found = []
    for drops in (False, True):
        model = wrapped(nn.Sequential(wrapped(nn.Linear(4, 4)), nn.Linear(4, 4)))
        if drops:
            model(torch.ones(1, 4))
        model.module[0].requires_grad_(False)
        try:
            model(torch.ones(1, 4)).sum().backward()
            found.append("no error")
        except AssertionError as error:
            found.append(str(error).split("(<")[0])
    if rank == 0:
        print(f"with a dropped output {found[1]}, without {found[0]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
