"""torch `FullyShardedDataParallel`: the order validation warns of forwards without gradients

At the debug level DETAIL, a forward under `no_grad` in training mode, as for a validation loss, is compared with the first
iteration. Where it runs other units it warns, and no forward after it is compared. In eval mode nothing is compared.
torch 2.13.0. Seen by ORDER-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["ORDER-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d \[.Forward order differs'
# ///

import os, tempfile, warnings, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        cpu = torch.device("cpu")
        self.first, self.second = (FSDP(nn.Linear(2, 2), device_id=cpu) for _ in range(2))

    def forward(self, x):
        return self.first(x) if torch.is_grad_enabled() else self.second(x)


def main(rank, world, path):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(Model(), device_id=torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 2))
    print(rank, [str(one.message)[:60] for one in caught if "order" in str(one.message)])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
