"""torch `FullyShardedDataParallel`: `writeback=False` does not drop what is written to gathered parameters

`summon_full_params` shows parameters that a forward has left gathered where they lie, and the next forward uses what was
written. With `rank0_only=True` the first rank alone does so. torch 2.13.0. Seen by EVALUATION-4.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["EVALUATION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d False$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    batch = torch.ones(2, 4)
    with torch.no_grad():
        before = model(batch)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            for parameter in model.parameters():
                parameter.zero_()
        print(rank, torch.equal(model(batch), before))  # False: the forward has the zeros
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
