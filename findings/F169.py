"""fairscale `ShardedGradScaler`: on the CPU, gradients that follow one that is not finite stay scaled

The loop over gradients ends at the first one with an infinity or a NaN. The optimizer's step is skipped, so that training goes on
rightly; what a script clips or logs after `unscale_` is as large as the scale. fairscale 0.4.13. Seen by SCALER-2.
"""

# /// finding
# implementations = ["fairscale.fsdp"]
# requirements = ["SCALER-2"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 1
# packages = ["fairscale==0.4.13"]
# shows = '^\[1\.0, inf, 1024\.0\]$'
# ///

import tempfile, torch, torch.distributed as dist
from fairscale.optim.grad_scaler import ShardedGradScaler

# Without a CUDA device the scaler disables itself.
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
optimizer = torch.optim.SGD(parameters, lr=1.0)
scaler = ShardedGradScaler(init_scale=1024.0)
scaler.scale(sum(parameters)).backward()
parameters[1].grad.fill_(torch.inf)
scaler.unscale_(optimizer)
print([one.grad.item() for one in parameters])  # [1.0, inf, 1024.0]
dist.destroy_process_group()
