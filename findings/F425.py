"""torch `FullyShardedDataParallel`: `.to()` and other conversions bring back a gradient that user code has replaced

With original parameters: the flat parameter keeps the gradient of which the parameters show views, and a conversion, also
one that changes nothing, makes all views anew. The next step trains with the gradient that backward had computed, and not
with the one that user code has put in its place, or with one that it has set to None, by itself or by `zero_grad`. Silent.
torch 2.13.0. Seen by DRAWN-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["DRAWN-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30", "torch 2.15.0 cpu 2026-11-30"]
# shows = '^after a conversion that changes nothing: dropped 1.0, replaced 1.0, cleared 1.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def wrapped(module):
    return FSDP(module, use_orig_params=True, device_id=torch.device("cpu"))


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = wrapped(nn.Linear(4, 4, bias=False))
    other, third = wrapped(nn.Linear(4, 4)), wrapped(nn.Linear(4, 4))
    for one in (model, other, third):
        one(torch.ones(1, 4)).sum().backward()
    model.module.weight.grad = model.module.weight.grad * 8
    other.module.weight.grad = None
    third.zero_grad()
    found = []
    for one in (other, model, third):
        one.to(torch.float32)
        gradient = one.module.weight.grad
        found.append(None if gradient is None else gradient.max().item())
    if rank == 0:
        print(
            f"after a conversion that changes nothing: dropped {found[0]}, replaced {found[1]}, cleared {found[2]}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
