"""torch `fully_shard`: a unit that was frozen in the first forward is reduced in the wrong dtype once it is thawed

The first forward settles the dtype of the parameters and of the reduction from the trainable parameters of a group. Where
there are none, a `param_dtype` later makes the reduced gradient bfloat16, which cannot become that of a float32 parameter,
and a `reduce_dtype` alone is ignored silently. torch 2.13.0. Seen by PRECISION-8.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["PRECISION-8"]
# fixed_in = "2.14"
# reproduces = ["torch 2.13.0 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.14.1 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d attempting to assign a gradient with dtype'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/186998 closed: Mixed precision breaks after unfreezing when the first forward ran with requires_grad=False",
#     "https://github.com/pytorch/pytorch/pull/187376 closed: its fix, Fix FSDP2 mixed precision reduce dtype after unfreezing params",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
    model(torch.ones(2, 4)).sum().backward()
    model[0].requires_grad_(True)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        print(rank, error)  # attempting to assign a gradient with dtype 'c10::BFloat16' to a tensor ...
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
