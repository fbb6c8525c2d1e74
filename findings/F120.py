"""torchtitan `simple_fsdp`: a second model in a process has the mesh and the policy of the first

torchtitan 0.3.0. `data_parallel` caches the classes that it creates, by the class of the module and the names of its parameters. A cached class keeps
the mesh, the mode and the policy of the first model: a bfloat16 model after a float32 one silently computes in float32, and
a hybrid one after a fully sharded one raises or aborts. `tests/harness/test_naive_adapters.py` shares rank processes between cases
and sees it. The adapter empties the cache before each case, so that only RESUME-3 sees it, with two meshes in one case. No report of it was found.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["RESUME-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^torch\.float32 torch\.float32$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

    mesh = init_device_mesh("cpu", (world,))
    first = data_parallel(nn.Sequential(nn.Linear(4, 4)), mesh, "fully_shard")  # float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    second = data_parallel(nn.Sequential(nn.Linear(4, 4)), mesh, "fully_shard", policy)
    print(first[0].weight.dtype, second[0].weight.dtype)  # torch.float32 torch.float32
    third = data_parallel(nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (1, world)), "hybrid_shard")
    try:
        third(torch.ones(1, 4)).sum().backward()
    except Exception as error:
        print(type(error).__name__, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
