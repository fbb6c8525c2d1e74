"""torch `FullyShardedDataParallel` with original parameters: what the order validation says is lost

At the debug level DETAIL with `use_orig_params=True`, ranks that gather different units in the first iteration get a
KeyError with a tensor for its text, because flat parameters have no names then; and the warning of a later iteration
reads "Expected to all-gather for [] but trying to all-gather parameters for a newly-added parameter since construction
time". With flat parameters both name the parameters. Seen by ORDER-1 and ORDER-2. `python findings/F011.py original` prints the
KeyError, `python findings/F011.py flat` the RuntimeError that is meant.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["ORDER-1", "ORDER-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# arguments = ["original"]
# shows = '^rank \d: KeyError: Parameter containing'
# ///

import os, sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


class Paths(nn.Module):
    def __init__(self, rank, **options):
        super().__init__()
        layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
        self.paths = nn.ModuleList(FullyShardedDataParallel(layer, **options) for layer in layers)
        self.rank = rank

    def forward(self, x):
        return self.paths[min(self.rank, 1)](x)


def main(rank, world, original, path):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    options = {"device_mesh": mesh, "device_id": torch.device("cpu"), "use_orig_params": original}
    model = FullyShardedDataParallel(Paths(rank, **options), **options)
    try:
        model(torch.randn(2, 4))
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {str(error)[:120]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, sys.argv[1] == "original", tempfile.mktemp()), nprocs=2)
