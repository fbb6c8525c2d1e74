"""torch before 2.13: each learning rate of an optimizer over DTensors leaves objects behind

Operators on DTensors keep what they have found out about their arguments, numbers among them, in a cache without a bound: a
schedule that gives each step another rate fills it, by each kind of kernels. With one rate nothing grows. torch 2.11.0;
2.13 holds no more after many steps. It serves every implementation with DTensors, the reference too. Seen by MEMORY-4.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["MEMORY-4"]
# fixed_in = "2.13"
# reproduces = ["torch 2.11.0 cpu 2026-11-29"]
# shows = '^one rate: 0 more objects, a rate for each step: [1-9]\d{2,} more'
# ///

import gc, tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def grown(mesh, rate):
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=False)
    counts = []
    for step in range(60):
        optimizer.param_groups[0]["lr"] = rate(step)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        if step in (19, 59):
            for _ in range(3):
                gc.collect()
            counts.append(len(gc.get_objects()))
    return counts[1] - counts[0]


dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
grown(mesh, lambda step: 0.1)  # what is made once
print(
    f"one rate: {grown(mesh, lambda step: 0.1)} more objects, a rate for each step: {grown(mesh, lambda step: 0.1 / (1 + step))} more"
)
dist.destroy_process_group()
