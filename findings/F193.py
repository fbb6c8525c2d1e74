"""torch `FullyShardedDataParallel` beside tensor parallelism: frozen parameters are trained

A DTensor parameter that needs no gradient needs one once it is wrapped. torch 2.13.0. Seen by FROZEN-1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["FROZEN-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '\b0\.weight.: True'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    print(rank, {name: param.requires_grad for name, param in model.named_parameters()})  # all False
    model = FSDP(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True)
    print(rank, {name: param.requires_grad for name, param in model.named_parameters()})  # those of layer 0 are True
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
