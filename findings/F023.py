"""torch `fully_shard`, `FullyShardedDataParallel`: an output that is a view and is changed in place is not gathered for backward

A unit returns a view of what it computed, and its caller writes `out += x`. The write gives the view another history,
without the hook that the implementation put on the output, so backward reaches the unit before its parameters are
gathered: `setStorage: ... out of bounds for storage of size 0`, or an assertion about the state of the wrapper. Seen by
AUTOGRAD-13.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp"]
# requirements = ["AUTOGRAD-13"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# shows = '^setStorage: .* out of bounds for storage of size 0|^ValueError: expected to be in states'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/181832 closed: Inplace operation on a view tensor can drop the fsdp pre-backward hook on it",
#     "https://github.com/pytorch/pytorch/pull/181850 closed: warn when forward output is a view tensor, which leaves the fix to later",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class View(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(-1, 4)[: x.shape[0]]


class Model(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.entry, self.inner = nn.Linear(4, 4), wrap(View(4, 4))

    def forward(self, x):
        x = self.entry(x)
        out = self.inner(x)
        out += x
        return out


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for wrap in (
        lambda m: fully_shard(m, mesh=mesh),
        lambda m: FullyShardedDataParallel(m, device_mesh=mesh, device_id=torch.device("cpu")),
    ):
        try:
            wrap(Model(wrap))(torch.randn(2, 4)).sum().backward()
            print("fine")
        except RuntimeError as error:
            print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
