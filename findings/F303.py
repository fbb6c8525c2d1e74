"""torch `fully_shard`: the `grad_dtype` of a parameter is lost

A parameter in bfloat16 with `grad_dtype = torch.float32` adds up its gradients in float32. `fully_shard` registers shards without
it: gradients add up, are reduced and are shown in bfloat16. Silent. Torch 2.15 keeps it. Found by reading what 2.15 changes;
no case asks for it.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-25"]
# shows = ' sharded torch\.bfloat16 '
# unlisted = "found by reading what torch 2.15 changes; no case asks for it"
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/170648 open: fsdp2 support grad_dtype, the report",
#     "https://github.com/pytorch/pytorch/pull/172074 open: a fix",
#     "https://github.com/pytorch/pytorch/pull/197203 closed: the one that landed",
# ]
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
for shard in (False, True):
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    if shard:
        fully_shard(model)
    for number, value in enumerate((256.0, 1.0, -256.0)):
        if shard:
            model.set_requires_gradient_sync(number == 2)
        model(torch.tensor([[value]], dtype=torch.bfloat16)).sum().backward()
    # Unsharded: 1.0 in float32. Sharded: 0.0 in bfloat16, and 1.0 in float32 with torch 2.15.
    print(torch.__version__, "sharded" if shard else "unsharded", model.weight.grad_dtype, model.weight.grad)
dist.destroy_process_group()
