"""torch `FullyShardedDataParallel`: where nothing is sharded, whole gradients of other strides are written back in another order

Under `NO_SHARD`, what a script writes to the whole gradient of a parameter that lies column by column lands in other
elements of the gradient. torch 2.13.0. Seen by CALLS-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d tensor\(\[\[0\., 2\.\],'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    layer = nn.Linear(2, 3, bias=False)
    layer.weight.data = layer.weight.detach().t().contiguous().t()
    strategy = ShardingStrategy.NO_SHARD
    model = FSDP(layer, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=strategy)
    model(torch.ones(1, 2)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        layer.weight.grad.copy_(torch.arange(6.0).view(3, 2))
    print(rank, layer.weight.grad)  # not the numbers from 0 to 5 in their order
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
