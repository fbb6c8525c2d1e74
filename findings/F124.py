"""torchtitan `simple_fsdp`: beside tensor parallelism, rows that the ranks cannot divide evenly abort

torchtitan 0.3.0. Shards are made into a DTensor without the shape of the whole, which is then taken for a multiple of this rank's: ranks
gather different sizes, and gloo aborts ("op.preamble.length <= op.nbytes"). Seen by COMPOSITION-1; the capability is not
declared. No report of it was found.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["COMPOSITION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = 'op\.preamble\.length'
# ///

import tempfile, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(
        nn.Linear(2, 6)
    )  # 3 rows for each tensor-parallel rank, of which data parallelism has 2 and 1
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    data_parallel(model, mesh["dp"], "fully_shard")
    print(rank, tuple(model[0].weight.to_local().shape))  # (4, 2) where dp's rank is 0, (2, 2) where it is 1
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
