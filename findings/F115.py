"""torch `ZeroRedundancyOptimizer`: a step moves half as many bytes again as it needs

Each gradient is all-reduced, which moves it twice, and each parameter is broadcast after the step, one by one. A
reduction to the rank that updates the parameter, and the broadcast, would move two thirds of that. torch 2.13.0. Seen by COLLECTIVES-8. The reproducer prints one all-reduce and two broadcasts.
"""

# /// finding
# implementations = ["torch.zero_optimizer"]
# requirements = ["COLLECTIVES-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'c10d\.allreduce_.*: 1, .*c10d\.broadcast_.*: 2'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    for step in range(3):
        with CommDebugMode() as counts:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    if rank == 0:
        print(dict(counts.get_comm_counts()))  # one all-reduce of all gradients, and a broadcast of each parameter
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
