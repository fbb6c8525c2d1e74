"""torch `GradScaler` and `ShardedGradScaler`: gradients on the CPU are unscaled with what is in memory

The scaler copies the inverse of the scale from the device to pinned memory without waiting, and unscales gradients on
the CPU by what is there: zero, or the scale of an earlier step. Offloaded shards get such gradients whenever the device
has work left. torch 2.11.0. Seen by SCALER-2, whose adapters have used a scaler of their own since. The reproducer prints
1.0 once, while memory is pinned for the first time, and then something else.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp"]
# requirements = ["SCALER-2"]
# reproduces = ["torch 2.11.0 cuda 2026-11-22"]
# gpus = 1
# shows = '^(?!1\.0$)(-?[\d.]+(e[-+]\d+)?|inf|nan)$'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/176429 closed: Use blocking CUDA->CPU copy in _GeneralMultiDeviceReplicator, for what was found and for the inverse of the scale",
# ]
# ///

import tempfile, torch, torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("nccl", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
scaler = ShardedGradScaler(init_scale=1024.0)
parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=1.0)
for scale in (1024.0, 128.0, 16.0):
    loss = scaler.scale(torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    parameter.grad = torch.full((4,), scale)
    scaler.unscale_(optimizer)
    print(parameter.grad[0].item())
    torch.cuda.synchronize()
    scaler.update(scale / 8)
dist.destroy_process_group()
