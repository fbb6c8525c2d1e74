"""torch `fully_shard`: a module of a shared unit that the loss calls again computes with freed parameters, torch 2.11

A unit of two modules, of which the model's forward calls one; the loss calls the other, a head, for chunks of the output,
each with its own backward. Backward of a chunk raises "The tensor has a non-zero number of elements, but its data is not
allocated yet". torch 2.11.0; torch 2.13.0 passes. Seen by TRAINING-7.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["TRAINING-7"]
# fixed_in = "2.13"
# reproduces = ["torch 2.11.0 cpu 2026-11-26"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-26"]
# shows = 'its data is not allocated yet'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Headless(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 3)

    def forward(self, x):
        return self.norm(self.layer(x))


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model, mesh = Headless(), init_device_mesh("cpu", (world,))
    for unit in (model.layer, [model.norm, model.head], model):
        fully_shard(unit, mesh=mesh)
    hidden = model(torch.randn(4, 9))
    cut = hidden.detach().requires_grad_()
    for chunk in cut.chunk(2):
        model.head(chunk).square().mean().backward()
    (hidden * cut.grad).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
