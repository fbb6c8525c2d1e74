"""torch `fully_shard` 2.11: a unit that returns a dataclass is not gathered for backward

Backward reads parameters whose storage was freed (`setStorage: ... out of bounds for storage of size 0`). The hook that
gathers for backward is put on the output's tensors, which 2.11.0 finds by `torch.utils._pytree.tree_flatten`; that does
not look into dataclasses, nor into classes of lists and tuples and what is a dict and a dataclass in one. In 2.12.0 they are found by `torch.distributed.fsdp._common_utils.collect_grad_tensors`,
which does (pytorch/pytorch#173415, continued in #174692). Seen by AUTOGRAD-3 with torch 2.11.0 over NCCL and over gloo,
and by COLLECTIVES-4 over gloo; with 2.13.0 both pass. The reproducer prints the error on both ranks with 2.13.0 and the fsdp package of 2.11.0
put into it, and none with that of 2.12.1 or its own; torch 2.12 itself was not run.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["AUTOGRAD-3", "COLLECTIVES-4"]
# fixed_in = "2.12"
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d setStorage: .* out of bounds for storage of size 0'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/173415 closed: support dataclass args/kwargs output, the first fix",
#     "https://github.com/pytorch/pytorch/pull/174692 closed: the same without memory leakage, which replaced it",
# ]
# ///

import dataclasses, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return Output(self.two(self.one(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = Unit()

    def forward(self, x):
        return self.unit(x).value


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model, mesh = Model(), init_device_mesh("cpu", (world,))
    fully_shard(model.unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        model(torch.randn(2, 4)).sum().backward()
        print(rank, "no error")
    except RuntimeError as error:
        print(rank, str(error).splitlines()[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
