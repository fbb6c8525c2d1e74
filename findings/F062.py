"""torch `FullyShardedDataParallel`: gradients that stay in low precision have the dtype of compute

`MixedPrecision.keep_low_precision_grads` is documented to keep gradients "in the dtype used for gradient reduction". They
are cast to the dtype of compute instead: reduced in float32 they are rounded to bfloat16 again, and reduced in bfloat16
alone they are widened. torch 2.13.0. Seen by PRECISION-12. The reproducer prints torch.bfloat16, and should
torch.float32.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["PRECISION-12"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d torch\.bfloat16$'
# related = [
#     "https://github.com/pytorch/pytorch/pull/90660 closed: Clean up `FlatParamHandle` dtypes, where `keep_low_precision_grads` was to be named `keep_grads_in_reduce_dtype`",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    precision = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True)
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), mixed_precision=precision)
    model(torch.ones(2, 4)).sum().backward()
    print(rank, next(model.parameters()).grad.dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
