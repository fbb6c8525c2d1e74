"""torch `fully_shard` before 2.13: under `torch.func` a unit cannot be gathered for the first time

Inside of `torch.func.grad`, `vjp`, `jvp` or `jacrev` the first gather allocates the memory of the parameters, and reads
the storage of a tensor that the transform has wrapped: `NotImplementedError: Cannot access storage of TensorWrapper`. A
forward outside of the transform that comes before does not help where parameters are freed after it. torch 2.11.0. Seen
by AUTOGRAD-18.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["AUTOGRAD-18"]
# fixed_in = "2.13"
# reproduces = ["torch 2.11.0 cpu 2026-11-29"]
# shows = '^NotImplementedError: Cannot access storage of TensorWrapper'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world,)))
    try:
        found = torch.func.grad(lambda x: model(x).square().sum())(torch.ones(2, 4)).shape
    except (NotImplementedError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
    if rank == 0:
        print(found, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
