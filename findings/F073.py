"""torch `fully_shard`: a deleted model waits for the garbage collector

Its states and modules refer to each other, so that the parameters and gradients of a model stay until a collection,
which a script that makes models in turn may meet late. torch 2.13.0. Seen by MEMORY-4.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["MEMORY-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "leak"
# shows = '^\d alive$'
# related = [
#     "https://github.com/pytorch/pytorch/pull/139650 closed: Make module-to-state mapping use weakrefs, before which nothing was freed",
# ]
# ///

import gc, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp, weakref
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    gc.disable()
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    held = weakref.ref(model)
    del model
    print(rank, "alive" if held() else "gone")  # alive
    gc.collect()
    print(rank, "alive" if held() else "gone")  # gone
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
