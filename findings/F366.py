"""torch FSDP1 `SHARD_GRAD_OP`: a unit that runs twice under re-entrant checkpoints may lose one of its two gradients

Each nested backward reduces the unit, and the second result is added to the first. Where GPUs are busy the second
result is at times added to what the memory of the first held before, such as zeros or another unit's gradient of the
step before. Silent. torch 2.11.0. Seen by RECOMPUTATION-5, alone and through accelerate and Lightning. A program of
two ranks with the script's loop, beside fifteen others on two GPUs, saw other gradients for the same batch in 0 to 15
of 260 iterations of a rank, and in 19 to 92 of 160 to 240 where it also copied each result of a reduction. There were
none with `FULL_SHARD` or `use_reentrant=False`. The script starts eight such programs; it was not run in this form.
"""

# /// finding
# implementations = ["torch.fsdp", "accelerate.fsdp1", "lightning.fabric_fsdp1"]
# requirements = ["RECOMPUTATION-5"]
# gpus = 2
# arguments = ["200"]
# shows = '^\d+ iterations, [1-9]\d* with other gradients'
# related = [
#     "https://github.com/pytorch/pytorch/pull/89781 closed: with re-entrant checkpoints, wrong gradients occasionally",
# ]
# ///

import sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils.checkpoint import checkpoint

WORLDS = 8  # at the same time, for busy GPUs


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (18, 27, 36)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, w), nn.ReLU(), nn.Linear(w, 9)) for w in widths)
        self.out = nn.Linear(9, 9)

    def forward(self, x):
        for layer in list(self.layers) * 2:
            x = checkpoint(lambda layer, x: torch.sin(layer(x)), layer, x, use_reentrant=True)
        return self.out(x)


def main(number, paths, iterations):
    rank = number % 2
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{paths[number // 2]}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Twice().cuda()
    options = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True, "device_id": rank}
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    model = FullyShardedDataParallel(model, **options)
    x = torch.randn(4, 9, device="cuda", requires_grad=True)
    first, other = None, 0
    for _ in range(iterations):
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        first = first or found
        other += any(not torch.equal(*pair) for pair in zip(found, first))
        model.zero_grad(set_to_none=True)
    print(iterations, "iterations,", other, "with other gradients", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, ([tempfile.mktemp() for _ in range(WORLDS)], int(sys.argv[1])), nprocs=2 * WORLDS)
