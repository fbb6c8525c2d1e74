"""torch `FullyShardedDataParallel`: reduced gradients come back after `zero_grad`

A backward inside `no_sync` sets the reduced gradients of an earlier backward aside. `zero_grad` drops, or with
`set_to_none=False` zeroes, what parameters show, and the next backward outside `no_sync` adds to what was set aside,
with original parameters and flat ones. Seen by ACCUMULATION-11. The reproducer prints gradients of 101, the sum of the
first and the last backward, instead of 1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["ACCUMULATION-11"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = '^originals (set to None|zeroed) \[101\.0, 101\.0\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for originals in (True, False):
        for drops in (True, False):
            model = FullyShardedDataParallel(
                nn.Linear(4, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=originals
            )
            model(torch.full((1, 4), 100.0)).sum().backward()
            with model.no_sync():
                model(torch.full((1, 4), 10.0)).sum().backward()
            model.zero_grad(set_to_none=drops)
            model(torch.ones(1, 4)).sum().backward()
            (gradient,) = [parameter.grad.flatten().tolist() for parameter in model.parameters()]
            kind = "originals" if originals else "flat"
            if rank == 0:
                print(kind, "set to None" if drops else "zeroed", gradient, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
