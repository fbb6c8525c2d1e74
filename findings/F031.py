"""torch `FullyShardedDataParallel.clip_grad_norm_`: gradients of float64 are refused

`linalg.vector_norm: the dtype of the input (Double) should be convertible without narrowing to the specified dtype
(Float)`: norms are taken in float32, whatever the gradients are. Seen by CLIPPING-7. The reproducer prints the error.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CLIPPING-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d linalg\.vector_norm: the dtype of the input \(Double\)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(4, 4).double(), device_id=torch.device("cpu"))
    model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    try:
        print(rank, model.clip_grad_norm_(1.0))
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
