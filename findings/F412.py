"""torch `ZeroRedundancyOptimizer`: within `Join`, ranks that have ended step with their last gradients

torch's page of `Join` shows `Join([model, optimizer])` with DDP. DDP's hook takes part in the all-reduces of the others
and drops the result, so that the optimizer's hook steps this rank's parameters with the gradients of its own last
backward, or not at all if these were set to None. The parameters are then sent to all ranks. The documentation of
`join_hook` asks for gradients that are "properly set", which DDP does not do.
"""

# /// finding
# implementations = ["torch.zero_optimizer"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^weights 2.00 and 4.00, with and without$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.optim import ZeroRedundancyOptimizer


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(2))  # one for each rank

    def forward(self, x):
        return sum(weight * x for weight in self.all)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    found = []
    for divides in (True, False):
        model = nn.parallel.DistributedDataParallel(Weights())
        if divides:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with Join([model, *([optimizer] if divides else [])]):
            for step in range(1 + rank):
                optimizer.zero_grad()
                model(torch.tensor(-1.0 - 5 * step)).backward()
                optimizer.step()
        found.append(model.module.all[0].item())
    if rank == 0:
        print(f"weights {found[0]:.2f} and {found[1]:.2f}, with and without", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
