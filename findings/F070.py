"""torch `fully_shard`: `reset_iter_state` keeps gradients that are not reduced yet

Its documentation has them lost, also those that accumulated while no reduction was wanted. They stay on the unsharded
parameters, out of reach of `zero_grad`, and the next backward adds to them: the step after an exception in backward, or
in a later microbatch, has wrong gradients. torch 2.13.0. Seen by RECOVERY-1.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["RECOVERY-1"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d tensor\(\[\[2\., 2\.\]\]\)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(2, 2, bias=False)))
    x = torch.ones(1, 2)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()  # the gradient accumulates, and then something raises
    model.reset_iter_state()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    print(rank, model[0].weight.grad.to_local())  # 2 everywhere instead of 1
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
