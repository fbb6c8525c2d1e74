"""torch `FullyShardedDataParallel`: a parameter that two units share is not refused

The unit that is wrapped first takes it. The other module keeps the object, of which the first unit has taken the data, and
its forward fails once both units have been gathered, here with "mat2 must be a matrix, got 1-D tensor". The error names
neither module. (torch documents that shared parameters must be in one unit.) torch 2.13.0. Seen by INIT-6.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["INIT-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d .*mat2 must be a matrix'
# related = [
#     "https://github.com/pytorch/pytorch/issues/83052 closed: FSDP init can crash with shared parameters, and an error that says why is asked for",
#     "https://github.com/Lightning-AI/pytorch-lightning/pull/21613 merged: Lightning warns when a wrap policy splits tied weights, for this error",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model[0] = FullyShardedDataParallel(model[0], **options)
    model = FullyShardedDataParallel(model, **options)
    try:
        model(torch.ones(2, 3))
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
