"""torch `FullyShardedDataParallel` beside tensor parallelism: the microbatch after one under `no_sync` raises

The first backward under `no_sync` leaves gradients on the unsharded parameters, which are DTensors there. The next forward
looks whether user code has put them on another device, in the memory of what has been freed: `Attempted to access the data
pointer on an invalid python storage`. So do a state dict and `summon_full_params` there. Without tensor parallelism it
trains. Seen by CALLS-14.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^0 Attempted to access the data pointer'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu"))
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    try:
        model(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        if rank == 0:
            print(rank, error, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
