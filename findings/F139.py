"""megatron-fsdp: torch's `clip_grad_norm_` hangs where a rank holds no row of a parameter

Such a rank has no gradient of the parameter, so that the ranks stack norms of different numbers of DTensors and issue
different collectives; one rank returns the norm of its own part. There is no other call to clip. megatron-fsdp 0.6.1,
torch 2.11.0. Seen by CLIPPING-1 through an adapter that calls it; `megatron_fsdp` does not claim to clip. With gloo
the reproducer fails on the second rank instead.
"""

# /// finding
# implementations = ["megatron_fsdp"]
# requirements = ["CLIPPING-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^time limit$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    model = fully_shard_model(model, fsdp_unit_modules=[nn.Linear])
    fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    print(rank, [*(p.grad is None for p in model.parameters())])  # [False, True, ...], and [False, False, ...]
    print(rank, nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())  # never returns on one rank
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
