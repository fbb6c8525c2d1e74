"""torch 2.11 DTensor: `redistribute` of a parameter raises in inference mode, mended in 2.13

`NotImplementedError: Operator aten.detach_.default does not have a sharding strategy registered`. torchtitan's
`simple_fsdp` redistributes every parameter in each forward, so that an evaluation in inference mode raises. Seen by
EVALUATION-1 on two H200s with torch 2.11, and no longer with 2.13.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["EVALUATION-1"]
# fixed_in = "2.13"
# reproduces = ["torch 2.11.0 cpu 2026-11-23"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^NotImplementedError: Operator aten\.detach_\.default does not have a sharding strategy'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/181876 closed: registers the strategy, for inference mode",
#     "https://github.com/pytorch/pytorch/issues/167917 open: the same error without inference mode",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (world,)), [Shard(0)]))
    with torch.inference_mode():
        print(
            rank, weight.redistribute(placements=[Replicate()]).shape
        )  # NotImplementedError: ... aten.detach_.default


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
