"""torch `FullyShardedDataParallel` next to tensor parallelism: within `no_sync`, state dicts and full parameters raise

Where gradients wait for their reduction those of tensor-parallel parameters are DTensors that view the unsharded
gradient. Before it gathers, a state dict or `summon_full_params` compares their memory with the flat gradient's, by a
storage that such a DTensor does not have, and raises RuntimeError about an invalid storage. So does the next forward.
Seen by CALLS-14.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29"]
# shows = '^state_dict RuntimeError Attempted to access the data pointer on an invalid python storage'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = FSDP(layers, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu"))
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
        try:
            model.state_dict()
            shown = "state_dict"
        except RuntimeError as error:
            shown = f"state_dict RuntimeError {error}"
    if rank == 0:
        print(shown, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
