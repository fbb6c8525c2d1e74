"""torch `FullyShardedDataParallel`: `summon_full_params(with_grads=True)` shows zeros for a gradient that was set to None

With original parameters, if another one of the unit has a gradient. Afterwards it is None again. A unit in which no
parameter has one shows none. torch 2.13.0. Seen by DRAWN-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["DRAWN-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30", "torch 2.15.0 cpu 2026-11-30"]
# shows = '^the gradient that was dropped: within 0.0, after None$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def wrapped(module):
    return FSDP(module, use_orig_params=True, device_id=torch.device("cpu"))


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = wrapped(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    weight = model.module.weight
    weight.grad = None
    with FSDP.summon_full_params(model, with_grads=True):
        shown = weight.grad.abs().max().item() if weight.grad is not None else None
    if rank == 0:
        print(f"the gradient that was dropped: within {shown}, after {weight.grad}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
