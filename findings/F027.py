"""torch `FullyShardedDataParallel`: the order validation does not notice that a forward ends early

At the debug level DETAIL the order is compared when a unit is about to be gathered, and never when a forward ends. In the
first iteration a rank that runs a unit less at the end takes part in no comparison; the rank that runs it waits in one,
until some other collective of the first meets it and torch's wrapper of process groups reports a mismatch of collectives,
which names no parameter. In later iterations a forward that ends early gives no warning on any rank. Seen by ORDER-5 and
ORDER-6. The reproducer prints the number of warnings, 0, of a second iteration without the last unit.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["ORDER-5", "ORDER-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d 0$'
# ///

import os, tempfile, warnings, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Optional(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList(FullyShardedDataParallel(nn.Linear(4, 4), **options) for _ in range(2))
        self.used = 2

    def forward(self, x):
        for layer in self.layers[: self.used]:
            x = layer(x)
        return x


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    options = {"device_id": torch.device("cpu")}
    inner = Optional(**options)
    model = FullyShardedDataParallel(inner, **options)
    model(torch.randn(2, 4)).sum().backward()
    inner.used = 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(2, 4)).sum().backward()
    print(rank, sum("Forward order differs" in str(one.message) for one in caught))


if __name__ == "__main__":
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs=2)
