"""torch `fully_shard`: gradients that have added up cannot be reduced with new ones in mixed precision

While the reduction is deferred, gradients add up in the reduce dtype. One of a parameter that the last microbatch alone
uses is new, and of the dtype of compute. If both parameters are of one module, the reduction raises. torch 2.13.0. Seen
by PRECISION-3.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["PRECISION-3"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d FSDP reduce-scatter expects uniform gradient dtype'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/196996 open: Gradient accumulation with fresh or unused parameters raises a mixed-dtype assertion",
#     "https://github.com/pytorch/pytorch/pull/160279 closed: cast `unsharded_param_grad` to correct reduce dtype",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x, index):
        return self.parts[index](x)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Choice()
    model = fully_shard(model, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2), 0).sum().backward()
    model.set_requires_gradient_sync(True)
    try:
        model(torch.ones(1, 2), 1).sum().backward()
    except AssertionError as error:
        print(rank, error)  # FSDP reduce-scatter expects uniform gradient dtype but got {torch.bfloat16, torch.float32}
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
