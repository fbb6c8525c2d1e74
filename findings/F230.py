"""torch `fully_shard`: after an evaluation backward gathers a unit for nothing

Forwards under `no_grad` are recorded in the post-forward order by which backward prefetches, and only the next backward
clears it. In the backward after an evaluation, the first unit of the training forward is therefore followed by the last
unit of the evaluation, which is all-gathered and dropped. A model that only evaluates keeps an entry for each unit and
forward as long as it lives.

Where the root has parameters of its own, it is that unit and is gathered already. torch 2.13.0. Seen by COLLECTIVES-4.
The reference did the same until this case existed.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COLLECTIVES-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "slow"
# right = '`2` twice: as many all-gathers in backward after an evaluation as without it. The second number is 3.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._record_post_forward",
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._backward_prefetch",
# ]
# shows = '^\d 3$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module)
    for evaluates in (False, True):
        if evaluates:
            with torch.no_grad():
                model(torch.ones(2, 4))
        loss = model(torch.ones(2, 4)).sum()
        with CommDebugMode() as mode:
            loss.backward()
        print(rank, sum(count for op, count in mode.get_comm_counts().items() if "gather" in str(op)))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
