"""fairscale `ShardedDataParallel`: gradients that the optimizer clears, or that user code replaces, are not reduced

Each gradient is a view of a buffer, and the buffer is what is reduced. `optimizer.zero_grad()` sets gradients to None by
default since torch 2.0, so that the next backward makes gradients outside of the buffers. The rank that owns a parameter then
steps with its own gradient, or with what the buffer had. The model's `zero_grad()` leaves the views in place, and the
adapter calls that. fairscale 0.4.13. Seen by OPTIMIZER-5 at the gradient of the second step.
"""

# /// finding
# implementations = ["fairscale.sdp"]
# requirements = ["OPTIMIZER-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["fairscale==0.4.13"]
# shows = '^\[\[0\.0, 0\.0\], \[0\.0, 0\.0\]\]$'
# upstream = [
#     "https://github.com/facebookresearch/fairscale/issues/354 closed",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(2, 2)
    optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(model, optimizer)
    for _ in range(2):
        model(torch.full((1, 2), float(rank))).sum().backward()
        if rank == 0:  # it updates the weight
            print(model.module.weight.grad.tolist())  # [[0.5, 0.5], [0.5, 0.5]], then [[0.0, 0.0], [0.0, 0.0]]
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
