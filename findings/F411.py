"""torch `ZeroRedundancyOptimizer`: parameters that a group holds in an iterator are never stepped

The constructor lists the parameters of all groups first, which uses an iterator up; the groups that it then makes are
empty. An optimizer of `torch.optim` takes such groups, as `{"params": model.parameters(), "lr": 0.1}`.
"""

# /// finding
# implementations = ["torch.zero_optimizer"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^moved: False$'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = nn.Linear(4, 4)
before = model.weight.detach().clone()
optimizer = ZeroRedundancyOptimizer([{"params": model.parameters(), "lr": 0.1}], torch.optim.SGD)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("moved:", not torch.equal(model.weight, before), flush=True)
dist.destroy_process_group()
