"""torch `fully_shard`: what the first forward refuses, the second does not

The first forward notes that the model is initialized before it checks the model. If a check refuses it (parameters on
the meta device, two dtypes in a unit, a parameter of two units) and user code catches the error and tries again,
nothing is checked any more: the second forward ends in an error that does not name the cause, computes without values,
or trains a shared parameter as two.

torch 2.13.0. Seen by INIT-5 and INIT-6.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["INIT-5", "INIT-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'The error of the first forward again, until the model is repaired.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init",
# ]
# shows = '^(\d) (<class .*)\n\1 (?!\2$)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    for _ in range(2):
        try:
            print(rank, model(torch.ones(2, 4)))  # the second time an error that names nothing
        except Exception as error:
            print(rank, type(error), str(error)[:70])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
