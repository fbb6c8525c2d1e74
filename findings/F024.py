"""torch `fully_shard`: a parameter without rows stops the reduction

A parameter whose first dimension is 0 has an empty gradient. The copy into the reduce-scatter input refuses it, and
backward raises `_chunk_cat expects non-empty tensor`. Forward, and the all-gather of the same parameter, work.

Seen by TRAINING-1.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["TRAINING-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'Backward ends, and `model.empty.grad` is an empty DTensor, as without `fully_shard`.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce_scatter_copy_in",
# ]
# shows = '^RuntimeError: _chunk_cat expects non-empty tensor'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(4, 4)
    model.empty = nn.Parameter(torch.randn(0, 4))
    model.register_forward_hook(lambda module, args, output: output + module.empty.sum(0))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model(torch.randn(2, 4)).sum().backward()  # _chunk_cat expects non-empty tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
