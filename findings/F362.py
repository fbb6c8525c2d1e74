"""megatron-fsdp: a unit that runs twice under re-entrant checkpoints gets wrong gradients

Each of the two nested backward passes reduces the unit. The result is not the sum of both: it is several times too
large. Silent. Units that run once under such checkpoints, or twice under others, are right. megatron-fsdp 0.6.1. Seen
by RECOMPUTATION-5. The script prints the losses after a step of SGD, of the plain model and of the sharded one, with
units that run once and twice.
"""

# /// finding
# implementations = ["megatron_fsdp"]
# requirements = ["RECOMPUTATION-5"]
# reproduces = ["torch 2.11.0 cuda 2026-11-27"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d twice ([\d.]+) (?!\1)'
# ///

import copy, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.utils.checkpoint import checkpoint


class Unit(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.layers, self.times = nn.ModuleList(Unit(4, 4) for _ in range(3)), times

    def forward(self, x):
        for layer in list(self.layers) * self.times:
            x = checkpoint(lambda layer, x: torch.sin(layer(x)), layer, x, use_reentrant=True)
        return x


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    for name, times in (("once", 1), ("twice", 2)):
        torch.manual_seed(0)
        plain, losses = Model(times).cuda(), []
        sharded = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[Unit], zero_dp_strategy=3)
        optimizer = fully_shard_optimizer(torch.optim.SGD(sharded.parameters(), lr=1.0))
        for model, one in ((plain, torch.optim.SGD(plain.parameters(), lr=1.0)), (sharded, optimizer)):
            for _ in range(2):
                loss = model(torch.ones(2, 4, device="cuda", requires_grad=True)).square().sum()
                loss.backward()
                one.step()
                one.zero_grad()
            losses.append(round(loss.item(), 4))
        print(rank, name, *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
