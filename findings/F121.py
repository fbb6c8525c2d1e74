"""torchtitan `simple_fsdp`: frozen parameters are trained

torchtitan 0.3.0. `data_parallel` registers a new `nn.Parameter` for each parameter, with `requires_grad=True`. Silent. Seen
by FROZEN-1 ("requires_grad is True"), and by CLIPPING-1 and FROZEN-5 ("the sharded run has a gradient, but the parameter is
frozen").
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["FROZEN-1", "CLIPPING-1", "FROZEN-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^\d True$'
# upstream = [
#     "https://github.com/pytorch/torchtitan/issues/3885",
#     "https://github.com/pytorch/torchtitan/pull/4282 open: mends it",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    data_parallel(model, init_device_mesh("cpu", (world,)), "fully_shard")
    print(rank, model._modules["0"]._parameters["weight"].requires_grad)  # True
    model(torch.ones(1, 4)).sum().backward()
    print(rank, next(model.parameters()).grad is not None)  # True
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
