"""torch `fully_shard`, `replicate_with_fsdp`: where each rank has all parameters, a divide factor divides twice in float16

`set_gradient_divide_factor` where the shard group has one rank: `fully_shard` on a (2, 1) mesh, or `replicate`. The
copy that replaces the reduce-scatter of one rank divides by the factor. If the reduce dtype is float16, or sums are
forced by `set_force_sum_reduction_for_comms`, the pre- and post-divisions around the all-reduce divide by it again.
Gradients are too small by the factor, silently.

torch 2.13.0. Seen by REDUCTION-1, at the gradients.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["REDUCTION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`0.25` (a sum of 2 divided by 8) for both. It prints 0.03125, which is 2 / 64.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce",
#     "torch.distributed.fsdp._fully_shard._fsdp_collectives:_get_gradient_divide_factors",
# ]
# shows = '^\d \w+ 0\.03125$'
# related = [
#     "https://github.com/pytorch/pytorch/pull/167178: which brought the first division",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    meshes = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for shard, mesh in zip((replicate, fully_shard), meshes):
        model = shard(nn.Linear(4, 4, bias=False), mesh=mesh, mp_policy=policy)
        model.set_gradient_divide_factor(8.0)
        model(torch.ones(1, 4)).sum().backward()
        print(rank, shard.__name__, model.weight.grad.to_local()[0, 0].item())  # 2 / 8 is right; 2 / 64 is printed
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
