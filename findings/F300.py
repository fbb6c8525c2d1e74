"""torch `fully_shard`: a model that is repaired after a refused first forward gets no gradients, torch 2.15

The first forward raises, here because the trainable parameters of a unit have two dtypes. User code repairs the model
and goes on. Forward and backward raise nothing then, no gradient is reduced, every `.grad` is None, and the optimizer
changes nothing. The cause is the order in the lazy initialization: `_is_root` is set before the checks, so that the
second forward skips it, and `_reduce_scatter_param_indices` (new in 2.15), which its last lines fill, stays empty. In
2.14 the same program raised an `AttributeError` in backward.

As in F-53, but silent; the next forward skips `lazy_init` (F-200). Seen by INIT-5.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["INIT-5"]
# since = "2.15"
# reproduces = ["torch 2.15.0 cpu 2026-12-01"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# severity = "silent"
# right = 'The gradients of all four parameters, or an error.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init",
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.lazy_init",
# ]
# shows = '^\d \[None, None, None, None\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    try:
        model(torch.ones(1, 4))
    except AssertionError as error:
        print(rank, error)  # FSDP expects uniform original parameter dtype but got ...
    model.float()
    try:
        model(torch.ones(1, 4)).sum().backward()
        print(rank, [parameter.grad for parameter in model.parameters()])  # [None, None, None, None]
    except AttributeError as error:
        print(rank, error)  # before torch 2.15
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
