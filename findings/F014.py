"""torch `FullyShardedDataParallel`: one data-parallel rank beside tensor parallelism raises with original parameters

A data-parallel mesh of one rank becomes `NO_SHARD`, which flattens the DTensor itself instead of its local part when it
looks for changed parameters: `Cannot writeback when the parameter shape changes`, or, where tensor-parallel sizes are
uneven, `Cannot flatten unevenly sharded tensor`. With two data-parallel ranks the same model trains, and so it does
with flat parameters. The adapters do not declare `single-rank`. Seen by COMPOSITION-2 and COMPOSITION-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["COMPOSITION-2", "COMPOSITION-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = '^8 originals: Cannot writeback when the parameter shape changes$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for width in (8, 9):
        for originals in (True, False):
            model = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4))
            plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            sharded = FullyShardedDataParallel(
                model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=originals
            )
            try:
                sharded(torch.randn(3, 4)).sum().backward()
                result = "trains"
            except RuntimeError as error:
                result = str(error).splitlines()[0]
            if rank == 0:
                print(width, f"{'originals' if originals else 'flat'}: {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
