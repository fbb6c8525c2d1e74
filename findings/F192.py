"""torch `FullyShardedDataParallel`: a whole parameter of another shape is dropped without a word

What a script puts in the place of a whole parameter inside `summon_full_params(writeback=True)` is written back if it has
the same shape, and dropped otherwise. torch 2.13.0. Seen by EVALUATION-5.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["EVALUATION-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d Parameter containing:\ntensor\(\[\[(?!0\., 1\.\])'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    layer = nn.Linear(2, 3, bias=False)
    model = FSDP(layer, device_id=torch.device("cpu"), use_orig_params=True)
    with FSDP.summon_full_params(model):
        layer.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    with FSDP.summon_full_params(model):
        print(rank, layer.weight)  # as it was before
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
