"""torchtitan `simple_fsdp`: what cannot be sharded is not named

torchtitan 0.3.0. A parameter without dimensions, or a mesh of three, raises without the name of the parameter, once other
modules have their new classes and parameters: the model is left half changed. Seen by INIT-5.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^\d Expected tensor\.dim\(\) > 0, got 0'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].scale = nn.Parameter(torch.ones(()))
    try:
        data_parallel(model, init_device_mesh("cpu", (world,)), "fully_shard")
    except AssertionError as error:
        print(rank, error)  # Expected tensor.dim() > 0, got 0
    print(rank, type(model).__name__, type(model[0]).__name__)  # SimpleFSDPSequential SimpleFSDPLinear
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
