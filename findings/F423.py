"""torch `FullyShardedDataParallel.clip_grad_norm_`: the inf-norm raises where a rank has empty gradients alone

With original parameters a rank that holds no element of a parameter has an empty one. Backward gives it no gradient; user
code that sets the gradients of all parameters gives it an empty one, of which torch has no inf-norm: the rank raises, and
the others wait for it. F-2 is the same with `fully_shard`, whose empty shards have gradients by themselves. torch 2.13.0.
Seen by DRAWN-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["DRAWN-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30", "torch 2.15.0 cpu 2026-11-30"]
# shows = '^rank 0: linalg.vector_norm cannot compute the inf norm on an empty tensor'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def wrapped(module):
    return FSDP(module, use_orig_params=True, device_id=torch.device("cpu"))


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    model(torch.ones(1, 4)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    try:
        model.clip_grad_norm_(1.0, float("inf"))
    except RuntimeError as error:
        if rank == 0:
            print(f"rank 0: {error}", flush=True)
        return  # the other rank waits for this one, and raises when it has gone
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
