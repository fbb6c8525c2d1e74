"""torch `fully_shard` over gloo: a divide factor raises

For float32 gradients the factor becomes a `PREMUL_SUM`, which gloo does not have; `set_force_sum_reduction_for_comms`
is a way around. torch 2.13.0. Seen by REDUCTION-1.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REDUCTION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# shows = '^\d Cannot use ReduceOp\.PREMUL_SUM with Gloo'
# related = [
#     "https://github.com/pytorch/pytorch/pull/155915 closed: Allow forcing FSDP2 to always use SUM reductions, the way around",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4))
    model.set_gradient_divide_factor(4.0)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        print(rank, error)  # Cannot use ReduceOp.PREMUL_SUM with Gloo
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
