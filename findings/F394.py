"""torch `ShardedGradScaler` on the CPU: the scale grows to infinity, and every later step is skipped

`torch.amp.GradScaler` keeps a scale whose double would be infinite in float32. `ShardedGradScaler` has arithmetic of its
own for a scale on the CPU, without this bound: losses are then infinite, all gradients too, and half of infinity is
infinity, so that training stands still for good. A scale can get there where gradients are small, as those of a frozen
or converged model, within 63 growths. Seen by SCALER-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["SCALER-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^GradScaler 1.7014\S+ ShardedGradScaler inf$'
# ///

import tempfile, torch, torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def last_scale(kind):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = kind("cpu", init_scale=2.0**126, growth_interval=1)
    for _ in range(3):
        parameter.grad = torch.ones(2)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    print("GradScaler", last_scale(torch.amp.GradScaler), "ShardedGradScaler", last_scale(ShardedGradScaler))
    dist.destroy_process_group()
