"""torch `fully_shard`: after resharding to a smaller size, backward raises where a parameter is cut along another dimension

`shard_placement_fn` returns `Shard(1)`, and `reshard_after_forward=2` on 4 ranks. The unshard of backward raises
`IndexError: list index out of range`: what is all-gathered from the post-forward shards is laid out as if these were
one-dimensional. Each of the two options works without the other.

torch 2.13.0. Seen by PLACEMENT-2.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["PLACEMENT-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'Backward ends and nothing is printed, or `fully_shard` refuses the two options together.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_all_gather_copy_out",
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_sharded_post_forward",
# ]
# shows = '^\d list index out of range'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(8, 8, bias=False)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh, reshard_after_forward=2, shard_placement_fn=lambda parameter: Shard(1))
    try:
        model(torch.ones(1, 8)).sum().backward()
    except IndexError as error:
        print(rank, error)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
