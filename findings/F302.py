"""torch `fully_shard`: microbatches are rounded to a narrower reduce dtype before they are added, torch 2.15

A regression of 2.15: parameters in float32, `reduce_dtype=torch.bfloat16`, and microbatches whose reduction is deferred
by `set_requires_gradient_sync(False)`. Up to 2.14 the gradients of the microbatches add up in float32, and their sum is
rounded once, for the reduction. In 2.15 the unsharded parameter has `grad_dtype = reduce_dtype`, so that each
microbatch is rounded to bfloat16 when it arrives, and the sum again: whatever is below the last bit of one microbatch
is lost, however many microbatches there are.

Seen by PRECISION-3. Two other changes of gradients in torch 2.15 are none for the worse, and no findings: without a
`reduce_dtype`, gradients are reduced in the dtype of the parameters (documented; earlier in that of compute), and
gradients that autograd computes in a wider dtype than that of compute are no longer rounded to it before they are
reduced.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["PRECISION-3"]
# since = "2.15"
# reproduces = ["torch 2.15.0 cpu 2026-12-01"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# severity = "silent"
# right = '`1.0078125`, which torch 2.11 to 2.14 print: the sum 1.00783, rounded once.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_unsharded_param",
# ]
# shows = '^\S+ 1\.0$'
# unlisted = "the cases of PRECISION-3 pass with torch 2.15 within their tolerance"
# related = [
#     "https://github.com/pytorch/pytorch/pull/197203 closed: Separate sharded and unsharded gradient dtypes, the change",
#     "https://github.com/pytorch/pytorch/pull/125191 closed: Accumulated in `reduce_dtype` if not syncing grads, for reduce dtypes that are wider",
# ]
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = nn.Linear(1, 1, bias=False)
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
microbatches = [1 + 2**-8, 2**-8 + 2**-16]  # the gradients; their sum is 1.00783
for number, value in enumerate(microbatches):
    model.set_requires_gradient_sync(number == len(microbatches) - 1)
    model(torch.tensor([[value]])).sum().backward()
print(torch.__version__, model.weight.grad.full_tensor().item())  # 1.0078125, and 1.0 with torch 2.15
dist.destroy_process_group()
