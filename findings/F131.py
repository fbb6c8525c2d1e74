"""torchtitan `simple_fsdp`: gradients are sums over the ranks

torchtitan 0.3.0. There is no division, and no option for one: torchtitan's trainer divides the loss by the number of tokens
of all ranks. A script that moves from `fully_shard` and does not divide has gradients as many times too large as there are
ranks, silently. The adapter divides the loss (`sums_over_ranks`), and in float16 small gradients underflow where those of an
average do not: seen by PRECISION-4.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["PRECISION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^\d \[\[2\.0, 2\.0\]\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    model = nn.Linear(2, 2, bias=False)
    data_parallel(model, init_device_mesh("cpu", (world,)), "fully_shard")
    model(torch.ones(1, 2)).sum().backward()
    print(rank, next(model.parameters()).grad.to_local().tolist())  # [[2.0, 2.0]]; an average is [[1.0, 1.0]]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
