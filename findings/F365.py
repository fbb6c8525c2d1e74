"""torch `fully_shard`: with a frozen unit, the microbatch after one that is not reduced may compute with wrong values

Backward gathers a frozen unit in vain (F-32). If this backward reduces nothing, the next forward starts while that
gather is still under way, and its first gather gets the same memory. The late shard of the other rank overwrites this
rank's, before it is sent to all: the frozen unit's weights were seen in place of the root's. Silent, and rare unless
the GPUs are busy. torch 2.11.0. Seen by DRAWN-2 beside other runs on the same GPUs. A program of two ranks with the
script's loop, beside fifteen others, saw other outputs of the second microbatch in 60 to 99 of 500 iterations, and
none if each backward reduces, if nothing is frozen, or with a synchronization between the microbatches. The script
starts eight such programs; it was not run in this form.
"""

# /// finding
# implementations = ["torch.fully_shard", "lightning.fabric"]
# requirements = ["DRAWN-2"]
# severity = "silent"
# gpus = 2
# arguments = ["200"]
# shows = '^\d+ iterations, [1-9]\d* with other outputs'
# ///

import sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WORLDS = 8  # at the same time, for busy GPUs


class Layer(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(dim, width), nn.Linear(width, dim), nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.gain


def main(number, paths, iterations):
    rank = number % 2
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{paths[number // 2]}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(5, 5 + n) for n in range(3)), nn.Linear(5, 5)).cuda()
    model[0].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for one in (*model[:3], model):
        fully_shard(one, mp_policy=policy)
    batches = [torch.randn(3, 5, device="cuda") for _ in range(2)]
    first, other = None, 0
    for _ in range(iterations):
        outputs = []
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == 1)
            output = model(batch)
            outputs.append(output.detach().clone())
            output.float().square().mean().backward()
        torch.cuda.synchronize()
        first = first or outputs
        other += any(not torch.equal(*pair) for pair in zip(outputs, first))
        model.zero_grad()
    if rank == 1:
        print(iterations, "iterations,", other, "with other outputs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, ([tempfile.mktemp() for _ in range(WORLDS)], int(sys.argv[1])), nprocs=2 * WORLDS)
