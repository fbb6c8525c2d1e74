"""fairscale `ShardedDataParallel`: gradients of parameters that the optimizer got later are not reduced

The wrapper reads once, when it is made, which parameters the optimizer has. Gradients of the others are not reduced, and those
of a group that `OSS.add_param_group` adds are not either: each owner trains on its own gradient. OSS documents such groups,
for layers that were frozen. fairscale 0.4.13. Silent. Seen by OPTIMIZER-2. The reproducer prints gradients before and after the group is added.
"""

# /// finding
# implementations = ["fairscale.sdp"]
# requirements = ["OPTIMIZER-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["fairscale==0.4.13"]
# shows = '^1 0 \[1\.0, 1\.0\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = OSS(model[0].parameters(), optim=torch.optim.SGD, lr=0.1)
    sharded = ShardedDataParallel(model, optimizer)
    for step in range(2):
        if step == 1:
            model[1].zero_grad()
            optimizer.add_param_group({"params": model[1].parameters()})
        (sharded(torch.ones(1, 2)).sum() * (1 + rank)).backward()
        print(step, rank, model[1].bias.grad.tolist())  # [1.0, 1.0] and [2.0, 2.0] instead of [1.5, 1.5], in both steps
        optimizer.step()
        sharded.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
