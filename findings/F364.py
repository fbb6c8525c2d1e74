"""Lightning Fabric's FSDP1 precision "32-true" is a mixed precision for torch, which then wraps other modules

lightning-fabric 2.6.6. In full precision `FSDPStrategy` hands `FullyShardedDataParallel` a `MixedPrecision` of
float32. Next to the user's policy torch then wraps each batch norm, and a policy by size loses the modules that it
leaves whole: what is in a `MultiheadAttention` is wrapped, and its forward raises `mat2 must be a matrix`. Buffers
stay on the GPU in a state dict that is put on the CPU for the first rank. With
`FSDPStrategy(mixed_precision=MixedPrecision(_module_classes_to_ignore=()))` none of this happens. Seen by WRAPPING-1,
WRAPPING-3, BUFFERS-1, STATE-1, STATE-2, STATE-12 and DETERMINISM-2 on two GPUs.
"""

# /// finding
# implementations = ["lightning.fabric_fsdp1"]
# requirements = ["WRAPPING-1", "WRAPPING-3", "BUFFERS-1", "STATE-1", "STATE-2", "STATE-12", "DETERMINISM-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["lightning-fabric>=2.6.6"]
# shows = '^\d without: 1 units, works; 32-true: [2-9] units, mat2 must be a matrix'
# ///

import functools, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.attention(x, x, x)[0].flatten(0, 1))


def tried(mixed_precision):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=64)
    options = {"auto_wrap_policy": policy, "mixed_precision": mixed_precision}
    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True, **options)
    units = sum(isinstance(one, FullyShardedDataParallel) for one in model.modules())
    try:
        model(torch.ones(3, 2, 8))
        return f"{units} units, works"
    except Exception as error:
        return f"{units} units, {str(error).splitlines()[-1]}"


def main(rank, world, path):
    from lightning_fabric.plugins.precision import FSDPPrecision

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    print(f"{rank} without: {tried(None)}; 32-true: {tried(FSDPPrecision('32-true').mixed_precision_config)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
