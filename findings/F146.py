"""megatron-fsdp: models are never freed

Neither half lets go of a model and its buffers, which the garbage collector does not find either. Tensors on a device
stay, more with every model. megatron-fsdp 0.6.1. Seen by MEMORY-4 and SHARDING-1, and as left-overs of larger models,
which the adapters therefore empty at the end of a case.
"""

# /// finding
# implementations = ["megatron_fsdp", "megatron_fsdp.experimental"]
# requirements = ["MEMORY-4", "SHARDING-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d (main|experimental) \w+ True$'
# ///

import gc, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp, weakref
from megatron_fsdp import fully_shard_model
from megatron_fsdp.experimental import Flat, Placements, fully_shard
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = dist.device_mesh.init_device_mesh("cuda", (world,))
    for kind in ("main", "experimental"):
        model = nn.Linear(2, 2).cuda()
        if kind == "main":
            model = fully_shard_model(model, fsdp_unit_modules=[nn.Linear])
        else:
            fully_shard(model, mesh, Placements([0], [Flat()], [Flat()], [Flat()]))
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        alive = weakref.ref(model)
        del model
        before = alive() is not None
        gc.collect()
        print(rank, kind, before, alive() is not None)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
