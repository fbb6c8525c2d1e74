"""torch `fully_shard`: what tensor-parallel ranks have of a gradient is summed in the dtype of compute

With a `reduce_dtype` the gradients of a module are reduced in it over the data-parallel ranks. A gradient that is a
pending sum over a tensor-parallel mesh, as that of a norm under sequence parallelism, is redistributed before, in the
dtype in which it was computed, so that the sum is rounded to it. torch 2.13.0. Seen by PRECISION-2.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["PRECISION-2"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d tensor\(\[256\., 256\.\]\)'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/190626 open: MixedPrecisionPolicy reduce_dtype is not applied to the TP-mesh Partial -> Replicate gradient all-reduce",
#     "https://github.com/pytorch/pytorch/pull/190627 open: Apply reduce_dtype to the non-DP-mesh gradient all-reduce",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return DTensor.from_local(x, self.weight.device_mesh, [Shard(0)]) * self.weight


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(distribute_module(Factor(), mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    x = torch.full((1, 4), 1.0 if rank % 2 else 256.0)
    model(x).to_local().sum().backward()
    print(rank, model.weight.grad.to_local())  # 256 on all ranks, instead of 257
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
