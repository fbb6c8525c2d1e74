"""torch `fully_shard`: a dataclass that is passed to a unit is made anew, without what was set since

With autograd a unit whose input requires a gradient is given a dataclass of `dataclasses.replace`. That runs `__init__` and
`__post_init__` again, and fields that the constructor does not take have the values of these. A comment in torch
says that side effects of `__post_init__` may not be compatible; no public documentation does. Silent. torch 2.13.0. Seen by
AUTOGRAD-3.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["AUTOGRAD-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# shows = '^tensor\(\[\[0\., 0\.\]\]\)$'
# ///

import dataclasses, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    mask: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.mask = torch.zeros_like(self.x)


class Masked(nn.Linear):
    def forward(self, pair):
        print(pair.mask)  # zeros, and not the ones that were set
        return super().forward(pair.x) * pair.mask


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = Masked(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    pair = Pair(torch.ones(1, 2, requires_grad=True))
    pair.mask = torch.ones(1, 2)
    model(pair)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
