"""megatron-fsdp: scripts freeze and change parameters in vain

Between steps a model registers its shards, and other parameters in forward: freezing the first has no effect on the
second, in both halves. New values of shards are lost in the main half, until `install_optimized_model_weights` or a
step copies them. Gradients that a script drops of some parameters of a unit are in its buffer still (main half), or raise
"must be either all set or all None" in the next backward (experimental). megatron-fsdp 0.6.1. Seen by FROZEN-4,
TRAINING-11, OPTIMIZER-3 and -5, and ACCUMULATION-10. The script shows the first, in
both halves; new values after an evaluation, its second line, are not lost, those that the cases set between steps are.
"""

# /// finding
# implementations = ["megatron_fsdp", "megatron_fsdp.experimental"]
# requirements = ["FROZEN-4", "TRAINING-11", "OPTIMIZER-3", "OPTIMIZER-5", "ACCUMULATION-10"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d True$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model
from megatron_fsdp.experimental import Flat, Placements, fully_shard
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh, x = dist.device_mesh.init_device_mesh("cuda", (world,)), torch.ones(1, 2, device="cuda")
    model = fully_shard_model(nn.Linear(2, 2).cuda(), fsdp_unit_modules=[nn.Linear])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    print(rank, model(x).requires_grad)  # True
    model(x).sum().backward()
    with torch.no_grad():
        before = model(x)
        for parameter in model.parameters():
            parameter.zero_()
        print(rank, torch.equal(model(x), before))  # False
    model = nn.Linear(2, 2).cuda()
    fully_shard(model, mesh, Placements([0], [Flat()], [Flat()], [Flat()]))
    model.requires_grad_(False)
    print(rank, model(x).requires_grad)  # True
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
