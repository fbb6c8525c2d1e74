"""torch `FullyShardedDataParallel`: gradients that were set to None keep their memory

With `use_orig_params=True` the parameters' gradients are views of the flat parameter's. `zero_grad` drops the views; the
flat gradient stays until the next forward. Between steps a rank holds a share of the model more than it needs. torch
2.13.0. Seen by MEMORY-2. The reproducer prints 2 shares, and with `use_orig_params=False` 1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["MEMORY-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d 2$'
# ///

import gc, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(64, 64), use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(1, 64)).sum().backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    print(rank, sum(found.values()) // (4 * 64 * 65 // 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
