"""torch `fully_shard`: a model with a parameter that is refused is left half sharded

Parameters of a module are checked and sharded one by one. If one is refused, here because it is not contiguous, those
before it are sharded already, and the module is no FSDP module: `weight` is a DTensor of a plain `nn.Linear`. The model
can neither be trained nor sharded again once the parameter is repaired.

torch 2.13.0. Seen by INIT-5.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'The error, and an unchanged module: `Linear Tensor`.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.__init__",
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._init_sharded_param",
# ]
# shows = ' Linear DTensor$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(3, 3)
    model.odd = nn.Parameter(torch.randn(4, 3).t())
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    except NotImplementedError as error:
        print(rank, error, type(model).__name__, type(model.weight.data).__name__)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
