"""torch `fully_shard`: after a refused forward of one module of a unit of several, the root is refused too

A unit of several modules cannot be the root. Where one of them is called before the root, "FSDP requires a single root
module" is raised, but the unit counts as initialized, and a forward of the root raises too. torch 2.13.0. Seen by TRAINING-3.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["TRAINING-3"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d .*FSDP state has already been lazily initialized'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]])
    fully_shard(model)
    for module in (model[0], model):
        try:
            module(torch.ones(2, 4)).sum().backward()
        except Exception as error:
            print(rank, type(error), str(error)[:300])
        else:
            print(rank, "grad", model[0].weight.grad)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
