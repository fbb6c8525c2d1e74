"""torch `FullyShardedDataParallel`: `sync_module_states=True` is refused on the CPU

Also with `device_id=torch.device("cpu")` over gloo, which can broadcast what is on the CPU. Seen by COMPOSITION-8.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["COMPOSITION-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'has CPU parameters or buffers when `sync_module_states=True`'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    try:
        FullyShardedDataParallel(
            nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu"), sync_module_states=True
        )
    except ValueError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
