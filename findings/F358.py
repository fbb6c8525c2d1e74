"""torch `fully_shard` before 2.13: a hook sees a gradient that has not arrived in pinned memory

With `CPUOffloadPolicy(pin_memory=True)`, the default, a reduced gradient is copied to the CPU while the host goes on, and
the hooks of `register_post_accumulate_grad_hook` run at once. They read what was in that memory before, so an optimizer
step in such a hook is silently wrong; the step after backward waits for the copies. torch 2.11.0. Seen by OFFLOAD-2 over
NCCL on two H200. Mended by a copy that the host waits for where there is a hook.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["OFFLOAD-2"]
# fixed_in = "2.13"
# reproduces = ["torch 2.11.0 cuda 2026-11-27"]
# gpus = 2
# shows = '^\d [1-9]\d* of 24 gradients differ'
# upstream = ["https://github.com/pytorch/pytorch/pull/180666 closed: hooks see stale gradients under CPUOffloadPolicy"]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    seen = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: seen.__setitem__(parameter, parameter.grad.to_local().clone())
        )
    wrong = 0
    for _ in range(3):
        model(torch.randn(64, 512, device="cuda")).square().sum().backward()
        wrong += sum(not torch.equal(seen[one], one.grad.to_local()) for one in model.parameters())
        model.zero_grad()
    print(rank, wrong, "of 24 gradients differ")  # of which a hook saw something else: 0 where it is mended
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
