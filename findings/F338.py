"""torch `fully_shard`: a unit that returns a dataclass runs its backward on shards, torch 2.11

The hooks that gather a unit for its backward look for tensors in tuples, lists and dicts only: `setStorage ... out of bounds for
storage of size 0`. torch 2.11.0; torch 2.13.0 passes. Seen by COLLECTIVES-4.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COLLECTIVES-4"]
# fixed_in = "2.12"
# reproduces = ["torch 2.11.0 cpu 2026-11-27"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-27"]
# shows = 'out of bounds for storage of size 0'
# related = [
#     "https://github.com/pytorch/pytorch/pull/174692 closed: hooks of outputs in dataclasses",
# ]
# ///

import dataclasses, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclasses.dataclass
class Packed:
    value: torch.Tensor


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, packed):
        return Packed(self.second(self.first(packed.value).tanh()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        packed = Packed(x)
        for layer in self.layers:
            packed = layer(packed)
        return packed.value


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model, mesh = Model(), init_device_mesh("cpu", (world,))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    model(torch.randn(4, 9)).square().mean().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
