"""megatron-fsdp: an evaluation after a step uses old values of what is in no unit

After a forward without backward, parameters in no unit stay gathered, and a step does not make them gather anew.
megatron-fsdp 0.6.1. Seen by EVALUATION-2. The reproducer prints True.
"""

# /// finding
# implementations = ["megatron_fsdp"]
# requirements = ["EVALUATION-2"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d True$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)).cuda()
    model = fully_shard_model(model, fsdp_unit_modules=[type(model[0])])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(1, 2, device="cuda")
    model(x).sum().backward()
    with torch.no_grad():
        before = model(x)
    optimizer.step()
    with torch.no_grad():
        print(rank, torch.equal(model(x), before))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
