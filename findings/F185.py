"""torch `fully_shard`: replicas keep what they have all-reduced of every unit until backward ends

On a (replicate, shard) mesh, with gradients reduced in another dtype than that of the parameters: the output of each
unit's reduce-scatter is all-reduced and then cast, and `FSDPParamGroup._all_reduce_state` keeps it, for the caching
allocator's sake, until the root's backward ends. Each group keeps its own, so that backward holds P / S elements more, as
many as the gradients that it computes; where the dtypes are the same they are those gradients. `shardproof plan --model
llama:70b --mesh 64x8 --param-dtype bfloat16 --reduce-dtype bfloat16` shows 16.4 GiB of it. The reference keeps two units'
at most. torch 2.13.0; torch 2.15.0 too, where the reduce dtype has to be named, since its default is another. Seen by
SIMULATION-5.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["SIMULATION-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# shows = '^\[1, 2, 3, 4, 5, 6, 7, 8\]'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/179128: the report",
#     "https://github.com/pytorch/pytorch/pull/179129 closed: two fixes",
#     "https://github.com/pytorch/pytorch/pull/179443 closed: two fixes",
#     "https://github.com/pytorch/pytorch/pull/183617 closed: a window of units whose buffers are kept, which a script sets",
# ]
# ///

import tempfile, weakref, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    reduced, all_reduce, kept = [], dist.all_reduce, []

    def watched(tensor, **options):
        reduced.append(weakref.ref(tensor))
        kept.append(sum(one() is not None for one in reduced))
        return all_reduce(tensor, **options)

    dist.all_reduce = watched
    model(torch.randn(2, 64)).float().sum().backward()
    if rank == 0:
        print(kept, sum(one() is not None for one in reduced))  # [1, 2, 3, 4, 5, 6, 7, 8] 0
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
