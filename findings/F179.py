"""torch `fully_shard`: a forward that computes gradients on its way finds the root's parameters sharded

A forward that calls `torch.autograd.grad` on the output of one of its submodules, as models that compute forces do,
cannot use the root's own parameters afterwards. At the end of the inner backward the root's final callback reshards all
units, the root too, whose forward goes on: `got mixed torch.Tensor and DTensor`. `FullyShardedDataParallel` runs this
model.

torch 2.13.0. Seen by AUTOGRAD-17. The reference did the same until this case existed.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["AUTOGRAD-17"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'The forward ends, as without `fully_shard`, and nothing is printed.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback",
# ]
# shows = '^\d aten\S* got mixed torch\.Tensor and DTensor'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy, self.out = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(place).square().sum(), place)
        return self.out(force)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = Forces()
    fully_shard(model.energy)
    fully_shard(model)
    try:
        model(torch.ones(1, 2))
    except RuntimeError as error:
        print(rank, error)  # got mixed torch.Tensor and DTensor
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
