"""torch `fully_shard`: a tensor that replaces a sharded parameter is dropped

User code that replaces a sharded parameter between two steps (`model.weight = nn.Parameter(...)`, a DTensor of the same
layout) is ignored: the next forward registers the unsharded parameter of the old shard, and the old shard again after
it. The new parameter is neither computed with nor registered any more, and nothing is said.

torch 2.13.0. Seen by TRAINING-12.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["TRAINING-12"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = 'Zeros in the second line of each rank, or an error about a parameter that was replaced.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._setattr_on_modules",
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_unsharded",
# ]
# shows = '^(\d) (tensor.*)\n\1 \2$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(2, 2, bias=False))
    print(rank, model(torch.ones(1, 2)))
    model.reshard()
    model.weight = nn.Parameter(torch.zeros_like(model.weight))
    print(rank, model(torch.ones(1, 2)))  # as before, and not zeros
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
