"""torch: fused optimizers do not count what they write as a new version, nor do lists of DTensors

Autograd, and implementations that keep gathered parameters, compare a tensor's version to see changes in place. The
fused kernels do not raise it, and `torch._foreach_*` operators do not where the tensors are DTensors. An evaluation between
backward and a fused step so left values that the next forward took for current ones, in both references until OPTIMIZER-1
asked for it; they count the steps of the optimizers of shards now. A sharded model of averages that `get_ema_multi_avg_fn` updates
(`torch._foreach_lerp_`) and that is evaluated again still uses the averages of before, with both. On CUDA
`torch._foreach_zero_` and `torch._foreach_lerp_` count nothing for plain tensors either (torch 2.11.0+cu130), so that
`zero_grad(set_to_none=False)` of a foreach optimizer is no new version of a gradient. torch 2.13.0. The reproducer prints 0; the gradient that follows
is that of no value that the parameter ever had with this loss, and raises nothing.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["OPTIMIZER-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^0$'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/197502 open: Track version counters for in-place foreach updates, of DTensors",
# ]
# ///

import torch
from torch import nn

weight = nn.Parameter(torch.ones(3))
loss = (weight * weight).sum()
weight.grad = torch.ones(3)
torch.optim.AdamW([weight], lr=0.5, fused=True).step()
print(weight._version)
loss.backward()  # an optimizer that is not fused makes this raise
