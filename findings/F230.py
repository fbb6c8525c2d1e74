"""torch `fully_shard`: after an evaluation backward gathers a unit for nothing

Forwards without autograd are noted in the order by which backward gathers the next unit ahead, and forgotten in the next
backward alone. The unit that ran first in the forward before this backward is then followed by the last one of the
evaluation: its parameters are gathered and dropped. Where the root has parameters of its own, it is that unit and is
gathered already. A model that only evaluates keeps an entry for each unit and forward, as long as it lives. torch 2.13.0.
Seen by COLLECTIVES-4. The reference did the same until this case existed. The reproducer prints 2 and then 3.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COLLECTIVES-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
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
