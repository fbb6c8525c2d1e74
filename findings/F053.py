"""torch `fully_shard`: a model whose first forward was refused fails in backward once it is repaired

The first forward marks the units as initialised before it checks that the trainable parameters of each have one dtype.
The next forward therefore skips what the check was to find out, and backward raises `'FSDPParamGroup' object has no
attribute '_orig_dtype'`. torch 2.13.0. Seen by INIT-5. With torch 2.15 nothing raises, which is worse: F-300.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-12-01"]
# shows = '^\d .FSDPParamGroup. object has no attribute ._orig_dtype'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    try:
        model(torch.ones(1, 4))
    except AssertionError as error:
        print(rank, error)  # FSDP expects uniform original parameter dtype but got ...
    model.float()
    try:
        model(torch.ones(1, 4)).sum().backward()
    except AttributeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
