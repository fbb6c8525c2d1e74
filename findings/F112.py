"""torch `_composable.replicate`: after a cast gradients are not reduced, without an error

A cast between two forwards, as `model.double().float()`, makes new nodes in the autograd graph for the parameters. DDP
has its hooks on the old ones: no backward reduces any more, and each rank trains alone. A cast before the first forward
is right, because DDP is made in that (F-111). torch 2.13.0. Seen by TRAINING-5, at the parameters after the step and at
the gradients. The reproducer prints 0.5 in the first step, and then 0 on one rank and 1 on the other.
"""

# /// finding
# implementations = ["torch.replicate"]
# requirements = ["TRAINING-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^0 2 0\.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed._composable import replicate


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = replicate(nn.Linear(1, 1, bias=False))
    for step in range(3):
        model(torch.full((1, 1), float(rank))).sum().backward()
        print(rank, step, model.weight.grad.item())  # 0.5 is right; after the cast each rank has its own
        model.zero_grad(set_to_none=True)
        if step == 0:
            model.double().float()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
