"""fairscale `ShardedDataParallel`: parameters that are frozen later move on

A gradient of a parameter that is frozen between two steps stays a tensor of zeros, with which the optimizer's
momentum goes on. It is documented to be handled. fairscale 0.4.13. Seen by FROZEN-4; with two ranks it also saw thawed
weights whose gradients were not reduced, which is not yet reduced to a reproducer. The reproducer prints weights before
and after a step that freezes them.
"""

# /// finding
# implementations = ["fairscale.sdp"]
# requirements = ["FROZEN-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["fairscale==0.4.13"]
# shows = '^(\[\[.*\]\]) (?!\1$)\[\['
# related = [
#     "https://github.com/facebookresearch/fairscale/issues/785 closed: a question whether parameters may be frozen and thawed between iterations, answered with yes",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.5, momentum=0.9)
    sharded = ShardedDataParallel(model, optimizer)
    for step in range(4):
        model.weight.requires_grad_(step % 2 == 0)
        sharded(torch.full((1, 2), float(step + 1))).sum().backward()
        before = model.weight.tolist()
        optimizer.step()
        if rank == 0 and not model.weight.requires_grad:
            print(before, model.weight.tolist())
        sharded.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
