"""torch `FullyShardedDataParallel`: `ignored_modules` from a generator are sharded

The argument is an iterable of modules. The wrapper goes through it once for a check, once more for what the check has
left, which is nothing of a generator, and then ignores no module, without a word: what user code wanted to keep whole
and local is sharded and averaged. `ignored_states` makes a list first. Seen by CALLS-16.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-16"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^list \(4, 4\) generator \((?!4, 4)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def shape(container):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = layers[0].weight
    FSDP(layers, ignored_modules=container([layers[0]]), use_orig_params=True, device_id=torch.device("cpu"))
    return tuple(weight.shape)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    found = f"list {shape(list)} generator {shape(iter)}"
    if rank == 0:
        print(found, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
