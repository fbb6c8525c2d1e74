"""torchtitan `simple_fsdp`: a class that sees what is set on its modules is not told of the shards

torchtitan 0.3.0. Parameters are registered past `__setattr__`: a module that keeps what was set, as recurrent ones of torch
do, goes on with the whole parameter, which then has no gradient of the model's. torch 2.13's own look again before each
forward. Seen by TRAINING-1.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["TRAINING-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^\d \w+ \[True, False\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Remembering(nn.Linear):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["latest"] = value

    def forward(self, x):
        return F.linear(x, self.__dict__["latest"], self.bias)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    model = data_parallel(Remembering(4, 4), init_device_mesh("cpu", (world,)), "fully_shard")
    model(torch.ones(1, 4)).sum().backward()
    print(
        rank, type(model.latest).__name__, [parameter.grad is None for parameter in model.parameters()]
    )  # True, False
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
