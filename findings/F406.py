"""torch `FullyShardedDataParallel`: a unit that its caller recomputes does not cast its inputs again

In forward a unit with `cast_forward_inputs=True` casts its inputs to the dtype of compute. In the recomputation of
`torch.utils.checkpoint` around the unit it returns them as they are, because backward has reached it: a module that gets
float32 raises for other metadata than in forward, or computes in float32 where that is not checked. F-40 is the same of
`fully_shard` of torch 2.11. Seen by RECOMPUTATION-6.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["RECOMPUTATION-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-30"]
# shows = "^0 the unit gets torch.bfloat16 in forward, torch.float32 in the recomputation"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.utils.checkpoint import checkpoint

seen = []


class Scaled(nn.Linear):
    def forward(self, x, scale):
        seen.append(scale.dtype)
        return super().forward(x) * scale.to(x.dtype)


class Caller(nn.Module):
    def __init__(self, unit):
        super().__init__()
        self.entry, self.unit = nn.Linear(4, 4), unit

    def forward(self, x):
        return checkpoint(self.unit, self.entry(x), torch.full((4,), 0.5), use_reentrant=False)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    low = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    options = {"mixed_precision": low, "device_id": torch.device("cpu")}
    FSDP(Caller(FSDP(Scaled(4, 4), **options)), **options)(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        print(rank, f"the unit gets {seen[0]} in forward, {seen[1]} in the recomputation", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
