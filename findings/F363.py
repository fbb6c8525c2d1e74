"""megatron-fsdp experimental: `main_params_dtype=None` makes parameters of any dtype float32, frozen ones too

The optimizer's copies are float32 unless another dtype is named, so that a script finds float32 parameters in the
sharded model, and saves them. megatron-fsdp 0.6.1. Seen by FROZEN-1 at a frozen bfloat16 parameter.
"""

# /// finding
# implementations = ["megatron_fsdp.experimental"]
# requirements = ["FROZEN-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-27"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d torch.bfloat16 became torch.float32'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp.experimental import Flat, Placements, fully_shard
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(4, 4, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    before, mesh = model.weight.dtype, dist.device_mesh.init_device_mesh("cuda", (world,))
    fully_shard(model, mesh, Placements([0], [Flat()], [Flat()], [Flat()]))
    print(rank, before, "became", model.weight.dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
