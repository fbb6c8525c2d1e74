"""megatron-fsdp experimental: a unit that is recomputed stays gathered, and later forwards use its old values

The recomputation in backward gathers the next unit ahead, which nothing frees and nobody gathers again after the
step. megatron-fsdp 0.6.1. Seen by RECOMPUTATION-1, -3 and -5, RANDOM-1 and AUTOGRAD-11, at the output of the second step.
The reproducer prints two different outputs of the same weights.
"""

# /// finding
# implementations = ["megatron_fsdp.experimental"]
# requirements = ["RECOMPUTATION-1", "RECOMPUTATION-3", "RECOMPUTATION-5", "RANDOM-1", "AUTOGRAD-11"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d \[(.*), (?!\1\])'
# upstream = [
#     "https://github.com/NVIDIA/Megatron-LM/pull/6153: a change after 0.6.1",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp.experimental import Flat, Placements, fully_shard, fully_shard_optimizer
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model, mesh = Model().cuda(), dist.device_mesh.init_device_mesh("cuda", (world,))
    for module in (*model.layers, model):
        if module is not model:
            fully_shard(module, mesh, Placements([0], [Flat()], [Flat()], [Flat()]))
    fully_shard(model, mesh, Placements([0], [Flat()], [Flat()], [Flat()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fully_shard_optimizer(optimizer)
    x = torch.ones(1, 4, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        seen = [model(x).sum().item() for _ in range(2)]
    print(rank, seen)  # two different values of the same weights
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
