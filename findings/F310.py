"""torch `replicate_with_fsdp`, `fully_shard` over one rank: a first forward in inference mode raises

Where there is nothing to gather from other ranks, the full parameters are copied into memory that the first forward has
made. Made in inference mode it has no version counter, which torch reads around the copy: `Inference tensors do not track
version counter`. Where ranks gather from each other torch leaves such memory out. Seen by EVALUATION-1.
"""

# /// finding
# implementations = ["torch.replicate_with_fsdp"]
# requirements = ["EVALUATION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^Inference tensors do not track version counter'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/197327 closed: fix crash during unsharding in inference mode",
# ]
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
try:
    with torch.inference_mode():
        print(model(torch.randn(2, 4)))
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
