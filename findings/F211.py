"""torch `FullyShardedDataParallel`: a parameter with gaps between its elements cannot be gathered

A parameter that is every other column of a larger tensor is wrapped without an error. The first gather raises
`setStorage: ... out of bounds`: its strides are those of the larger tensor. torch 2.13.0. Seen by CALLS-11.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-11"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^RuntimeError: setStorage: .* out of bounds for storage'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.arange(8.0).view(2, 4)[:, ::2])
    model = FSDP(layer, device_id=torch.device("cpu"), use_orig_params=True)
    with FSDP.summon_full_params(model):  # raises
        print(rank, layer.weight)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
