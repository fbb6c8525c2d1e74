"""torch `FullyShardedDataParallel`: a second backward raises

The first backward frees the root's parameters, and neither the backward of another forward that ran before it, nor
another one of the same graph, gathers them again, so that torch's pipeline schedules raise. torch 2.13.0. Seen by AUTOGRAD-8
and ACCUMULATION-13.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["AUTOGRAD-8", "ACCUMULATION-13"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d setStorage: .* out of bounds for storage of size 0'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/136861 closed: Error when calling multiple backward passes on FSDP model",
#     "https://github.com/pytorch/pytorch/issues/106637 closed: Using retain_graph in backward() with FSDP",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    inner = FullyShardedDataParallel(nn.Linear(2, 2), **options)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(2, 2)), **options)
    first, second = (model(torch.ones(1, 2)).square().sum() for _ in range(2))
    first.backward()
    try:
        second.backward()
    except RuntimeError as error:
        print(rank, error)  # setStorage: sizes ... are out of bounds for storage of size 0
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
