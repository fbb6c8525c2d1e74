"""torch `fully_shard`: a model that is repaired after a refused first forward gets no gradients, torch 2.15

As in F-53, but silent. In torch 2.15 a group reduces the parameters of a list, `FSDPParamGroup._reduce_scatter_param_indices`,
which the last lines of `lazy_init` fill. A check before them that raises, here because the trainable parameters have two
dtypes, leaves it empty, and the next forward skips `lazy_init` (F-200). After the repair, forward and backward raise nothing,
no gradient is reduced, all stay None, and the optimizer changes nothing. Seen by INIT-5.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["INIT-5"]
# since = "2.15"
# reproduces = ["torch 2.15.0 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
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
