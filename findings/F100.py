"""torch 2.11 `fully_shard`: parameters of integers are refused, mended in 2.13

`FSDPParam` makes the shard an `nn.Parameter` before it takes `requires_grad` from the original, and integers cannot
require gradients. Seen by FROZEN-6. With torch 2.11.0 the reproducer raises "only Tensors of floating point dtype can
require gradients".
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["FROZEN-6"]
# fixed_in = "2.13"
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'only Tensors of floating point dtype can require gradients'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/185239 closed: fully_shard crashes on non-floating-point parameters (e.g. uint8), _init_sharded_param omits requires_grad= kwarg",
#     "https://github.com/pytorch/pytorch/issues/177844 closed: nn.Parameter creation in FSDPParam crashes for non floating point tensors",
# ]
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = nn.Linear(4, 4)
model.order = nn.Parameter(torch.arange(4), requires_grad=False)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
print(model.order)
dist.destroy_process_group()
