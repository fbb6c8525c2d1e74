"""torch `_composable.replicate`: what it refuses it refuses in the first forward, and that must not be an evaluation

`replicate` puts hooks on the module and changes its class at once, and makes its DDP in the first forward. A mesh of
three dimensions is refused there, when the model is no longer as it was. If that forward runs in inference mode, DDP's
buffers are inference tensors, and the first backward raises. It also sends all parameters from the first rank, in a
training step or in an evaluation: `replicate` alone moves half as many bytes again in the first step. torch 2.13.0. Seen
by INIT-5, EVALUATION-1 and COLLECTIVES-8. The reproducer prints both errors.
"""

# /// finding
# implementations = ["torch.replicate"]
# requirements = ["INIT-5", "EVALUATION-1", "COLLECTIVES-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d (a mesh Only 1D device mesh|inference mode Inplace update)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = replicate(nn.Linear(4, 4), device_mesh=init_device_mesh("cpu", (1, 1, world)))  # no error
    for when, mode in (("a mesh", torch.enable_grad), ("inference mode", torch.inference_mode)):
        if when == "inference mode":
            model = replicate(nn.Linear(4, 4))
        try:
            with mode():
                model(torch.randn(2, 4))
            model(torch.randn(2, 4)).sum().backward()
        except RuntimeError as error:
            print(rank, when, str(error)[:100])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
