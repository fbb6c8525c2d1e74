"""torch `FullyShardedDataParallel.clip_grad_norm_` beside tensor parallelism: the norm is that of this rank's tensor-parallel part

The norm is reduced over the data-parallel ranks alone, so that every tensor-parallel rank clips by another one; silent,
and parameters that all should hold alike go apart. Seen by CLIPPING-4.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CLIPPING-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^rank \d: (\S+) instead of (?!\1$)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    model.zero_grad()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True
    )
    sharded(x).sum().backward()  # every rank has the same input, so the averages are the gradients above
    print(f"rank {rank}: {sharded.clip_grad_norm_(1.0).item():.4f} instead of {expected.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
