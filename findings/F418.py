"""torch `ZeroRedundancyOptimizer`: a frozen parameter of another dtype is refused

The optimizer wants one dtype of all parameters that it is given, also of those that require no gradient and that no step
changes. An optimizer of torch takes them. Seen by FROZEN-1 with a frozen scale in bfloat16.
"""

# /// finding
# implementations = ["torch.zero_optimizer"]
# requirements = ["FROZEN-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^ValueError: ZeroRedundancyOptimizer only supports using the same dense type for all parameters'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = nn.Linear(4, 4)
frozen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
try:
    ZeroRedundancyOptimizer([*model.parameters(), frozen], torch.optim.SGD, lr=0.1)
except ValueError as error:
    print(f"ValueError: {error}")
dist.destroy_process_group()
