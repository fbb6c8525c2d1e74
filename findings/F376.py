"""torch `FullyShardedDataParallel`: functions of `torch.func` over the inputs of a sharded model raise

`grad`, `vjp`, `jvp`, `jacrev` and gradients of each sample fail with "Cannot access storage of TensorWrapper" if they are the
first forward, and otherwise with errors such as "tensor does not have a device": the memory that is gathered is made
inside of the transform. `vmap` alone works. `fully_shard` makes it outside. Seen by AUTOGRAD-18.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["AUTOGRAD-18"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = '^NotImplementedError: Cannot access storage of TensorWrapper'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    try:
        found = torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 4))
    except (NotImplementedError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
    if rank == 0:
        print(found, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
