"""torch `FullyShardedDataParallel`: with a compute dtype, a forward whose output is dropped costs the next step its gradients

`_register_post_backward_hook` hooks the AccumulateGrad node of the first forward since the last backward. With `param_dtype`
the flat parameter has other data in each forward, and so another node: if the output of the first one is dropped, its hook
never runs. The next backward reduces nothing. Original parameters have no gradient, a flat parameter has this rank's own,
unsharded; the optimizer skips the step without an error. torch 2.13.0. Seen by PRECISION-2.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["PRECISION-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-26"]
# shows = '^\d \[None, None\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True, mixed_precision=policy)
    model(torch.ones(1, 2))  # without this, one parameter has a gradient
    model(torch.ones(1, 2)).sum().backward()
    print(rank, [parameter.grad for parameter in model.parameters()])  # [None, None]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
