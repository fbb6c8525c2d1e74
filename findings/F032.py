"""torch `fully_shard`: backward gathers units whose backward never comes

Backward prefetches the unit that ran before in forward, also if that unit is frozen and its output needs no gradient,
as the frozen layers below a trained head. Backward never reaches such a unit: each one next to a trained unit costs an
all-gather whose result nothing uses. Gradients are right.

Training is right. Seen by FROZEN-5.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["FROZEN-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "slow"
# right = '`1`: the unit of the last layer needs its parameters in backward, the two frozen ones below it do not. 2 all-gathers run.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._backward_prefetch",
# ]
# shows = '^\d 2$'
# related = [
#     "https://github.com/pytorch/pytorch/pull/118118 closed: Added backward prefetching, which names mistargeted prefetches as a limit of the order that it goes by",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[:2].requires_grad_(False)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(torch.randn(2, 4)).sum()
    with profile() as recorded:
        loss.backward()
    print(rank, sum("all_gather_copy_in" in event.name for event in recorded.events()))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
