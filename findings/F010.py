"""torch `FullyShardedDataParallel`: offloading to the CPU needs an accelerator

`CPUOffload(offload_params=True)` pins the shards whatever the device, and without an accelerator the first forward
raises. There is no choice of memory, as `CPUOffloadPolicy(pin_memory=False)` is one for `fully_shard`. Seen by
COMPOSITION-6 and OFFLOAD-1; the adapter lacks `pageable-offload`, and `tests/harness/test_offloading_on_the_cpu.py`
declares it and sees the case fail.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["COMPOSITION-6", "OFFLOAD-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'Cannot access accelerator device|Found no NVIDIA driver'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(
        nn.Linear(4, 4),
        device_mesh=init_device_mesh("cpu", (world,)),
        device_id=torch.device("cpu"),
        cpu_offload=CPUOffload(offload_params=True),
    )
    try:
        model(torch.randn(2, 4))
    except RuntimeError as error:
        print(rank, error)  # Cannot access accelerator device when none is available.
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
