"""torch `FullyShardedDataParallel`: a cast between microbatches that are not reduced ends in an error

With `use_orig_params=True` the backward after a cast there and back, of a model that has gradients of `no_sync`, raises on
every rank: "Expects tensor to be sharded". torch 2.13.0. Seen by ACCUMULATION-11.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["ACCUMULATION-11"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^(\d |AssertionError: )Expects tensor to be sharded with size'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Linear(9, 9), device_id=torch.device("cpu"), use_orig_params=True)
    with model.no_sync():
        model(torch.ones(2, 9)).sum().backward()
    model.double().float()
    try:
        model(torch.ones(2, 9)).sum().backward()
    except AssertionError as error:
        print(rank, error)  # Expects tensor to be sharded with size torch.Size([47]) but got torch.Size([94])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
