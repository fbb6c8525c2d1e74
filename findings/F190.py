"""torch `FullyShardedDataParallel`: within `no_sync`, whole gradients cannot be had

`summon_full_params(with_grads=True)` between two microbatches, the first of which has not been reduced, raises in the
midst: unreduced gradients are taken for shards. torch 2.13.0. Seen by EVALUATION-4. The reference raised too where a rank
had all of a parameter, until this case existed.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["EVALUATION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d Expects tensor to be sharded with size'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=True)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    try:
        with FSDP.summon_full_params(model, writeback=False, with_grads=True):
            pass
    except AssertionError as error:
        print(rank, error)  # Expects tensor to be sharded with size torch.Size([8]) but got torch.Size([16])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
