"""megatron-fsdp: a parameter without dimensions or with other strides is sharded as another one, or hangs

A transposed parameter is sharded as a contiguous one, so that its shards have other elements, and a scalar becomes a
vector, of other lengths on other ranks. If the scalar is frozen, only the rank that holds it takes part in the check
of its bounds when the model is sharded, and waits for the others. megatron-fsdp 0.6.1. Seen by INIT-5. The script
prints shapes and strides before and after.
"""

# /// finding
# implementations = ["megatron_fsdp"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.11.0 cuda 2026-11-27"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d turned \(6, 4\) \(1, 6\) became \(6, 4\) \(4, 1\)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned, self.scale = nn.Parameter(torch.ones(4, 6).t()), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x @ self.turned * self.scale


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = Model().cuda()
    before = {name: (tuple(one.shape), one.stride()) for name, one in model.named_parameters()}
    sharded = fully_shard_model(model, fsdp_unit_modules=[Model], zero_dp_strategy=3)
    for name, one in sharded.module.named_parameters():
        print(rank, name, *before[name], "became", tuple(one.shape), one.stride())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
