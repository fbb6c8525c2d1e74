"""torch `FullyShardedDataParallel.check_is_root` before the first forward makes the wrapper that is asked the root

The question initialises the wrapper, as the first forward of a root does. Asked of a wrapper inside a model before the
model has run, as by a loop over `fsdp_modules(model)`, it answers True, and the first forward of the model raises. Asked of
the root first, the others say False. Found by making the calls of CALLS-14 before the first forward.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^0 inner wrapper is root: True'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    cpu = torch.device("cpu")
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4), device_id=cpu), nn.Linear(4, 4)), device_id=cpu)
    print(rank, "inner wrapper is root:", model[0].check_is_root(), flush=True)
    try:
        model(torch.ones(2, 4))
    except AssertionError as error:
        print(rank, error, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
