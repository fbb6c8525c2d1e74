"""torch `FullyShardedDataParallel`: after a cast between backward and step, the step is lost

The optimizer updates memory that the next forward does not read. New data that a script gave parameters before a cast
is lost too. Optimizers of unsharded models, and of `fully_shard`, are not affected. torch 2.13.0. Seen by TRAINING-5.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["TRAINING-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^(\d) (\[.*\])\n\1 (?!\2$)\[.*\n\1 \2$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()
    model.double().float()
    print(rank, model.weight.tolist())  # for example [-0.19, 0.32, 0.52]
    optimizer.step()
    print(rank, model.weight.tolist())  # [-1.19, -0.68, -0.48]
    model(torch.ones(1, 2))
    print(rank, model.weight.tolist())  # [-0.19, 0.32, 0.52]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
