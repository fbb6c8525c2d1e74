"""megatron-fsdp experimental: tied parameters are untied

Each name becomes a parameter of its own, with a gradient and a state. megatron-fsdp 0.6.1. Seen by TIED-1, TIED-2 and
CLIPPING-1.
"""

# /// finding
# implementations = ["megatron_fsdp.experimental"]
# requirements = ["TIED-1", "TIED-2", "CLIPPING-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d \[.0\.weight., .0\.bias., .1\.weight., .1\.bias.\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp.experimental import Flat, Placements, fully_shard
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda()
    model[1].weight = model[0].weight
    mesh = dist.device_mesh.init_device_mesh("cuda", (world,))
    fully_shard(model, mesh, Placements([0], [Flat()], [Flat()], [Flat()]))
    print(rank, [name for name, _ in model.named_parameters()])  # ['0.weight', '0.bias', '1.weight', '1.bias']
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
