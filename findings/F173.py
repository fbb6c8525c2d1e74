"""torch `FullyShardedDataParallel`: within `no_sync`, frozen original parameters have gradients

Views of the unsharded gradient of the flat parameter are given to all parameters of a unit, the frozen ones too. torch
2.13.0. Seen by FROZEN-1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["FROZEN-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d False tensor\('
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    print(rank, model.module.bias.requires_grad, model.module.bias.grad)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
