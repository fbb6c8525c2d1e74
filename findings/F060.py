"""torch DTensor: fused SGD has no sharding strategy

`SGD(fused=True)` raises for parameters that are DTensors; Adam and AdamW are fused. torch 2.13.0. The cases of OPTIMIZER-1
leave fused SGD out.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["OPTIMIZER-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^Operator aten\._fused_sgd_\.default does not have a sharding strategy registered'
# related = [
#     "https://github.com/pytorch/pytorch/issues/126670 closed: the same of fused AdamW, in an older version",
# ]
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
weight = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()]))
weight.sum().backward()
try:
    torch.optim.SGD([weight], lr=0.1, fused=True).step()
except NotImplementedError as error:
    print(error)  # Operator aten._fused_sgd_.default does not have a sharding strategy registered.
dist.destroy_process_group()
