"""torch `FullyShardedDataParallel`: a unit that casts its inputs cannot be recomputed by a checkpoint around it

The forward that backward runs again skips the casts of the first one, so that the unit computes with other dtypes and
`torch.utils.checkpoint` raises. torch 2.13.0. Seen by PRECISION-5.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["PRECISION-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d CheckpointError$'
# related = [
#     "https://github.com/pytorch/pytorch/issues/159359 closed: the same of `fully_shard`, F-40",
#     "https://github.com/pytorch/pytorch/pull/150044 closed: a draft for `fully_shard`, which compares the two and takes `FullyShardedDataParallel` for right",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self, unit):
        super().__init__()
        self.unit, self.bias = unit, nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return checkpoint(self.unit, x + self.bias, use_reentrant=False)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    precision = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    unit = FullyShardedDataParallel(nn.Linear(4, 4), mixed_precision=precision, **options)
    model = FullyShardedDataParallel(Model(unit), **options)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        print(rank, type(error).__name__)  # CheckpointError: Recomputed values ... have different metadata
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
