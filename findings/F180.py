"""torch `fully_shard`: a model that is cast after its first forward cannot run

The memory into which gathers are copied keeps the dtype of the first forward. A cast before that works, and so does a cast
there and back. torch 2.13.0. Seen by TRAINING-5. The documentation of torch 2.15 calls a cast after the first forward or
`unshard()` unsupported; the error is the same, and names nothing of it.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["TRAINING-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# shows = '^\d Expected out tensor to have dtype'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model.to(torch.bfloat16)
    try:
        model(torch.ones(1, 2, dtype=torch.bfloat16))
    except RuntimeError as error:
        print(rank, error)  # Expected out tensor to have dtype c10::BFloat16, but got float instead
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
