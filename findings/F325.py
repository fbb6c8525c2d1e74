"""torch FSDP1: where nothing is sharded, `torch.autograd.grad` of an output before `backward` leaves gradients as they are

With `NO_SHARD` the units count as having run their backward: flat parameters keep the gradients of their own rank, of which
nobody takes the average, and with `use_orig_params=True` `parameters()` is empty afterwards.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["AUTOGRAD-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^rank 1: the gradient is 2.0, the average 1.5'
# unlisted = "cases that call autograd.grad before a backward shard their units"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    output = model(torch.full((1, 1), rank + 1.0))
    loss = output.sum()
    torch.autograd.grad(loss, output, retain_graph=True)
    loss.backward()
    (parameter,) = model.parameters()
    print(f"rank {rank}: the gradient is {parameter.grad.item()}, the average 1.5", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
