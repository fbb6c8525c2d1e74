"""torch `clip_grad_norm_`: the norm of float16 gradients is infinite from 65504 on, and clipping makes them zero

`torch.nn.utils.clip_grad_norm_` takes the norm of each gradient in its own dtype, so a float16 gradient whose norm is
larger than the largest float16 counts as infinite, beside gradients of float32 too. The factor is zero then, and so is
every gradient. Smaller norms are rounded to float16 (or bfloat16) before they are added. Seen by CLIPPING-7 with
`fully_shard`; `FullyShardedDataParallel.clip_grad_norm_` is right. The reproducer prints inf and zeros.
"""

# /// finding
# implementations = ["torch.fully_shard", "torchtitan.simple_fsdp"]
# requirements = ["CLIPPING-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# shows = '^\d inf '
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/194033 open: get_total_norm: add a dtype argument for the accumulation",
# ]
# related = [
#     "https://github.com/pytorch/torchtitan/pull/4135 open: TorchTitan computes the total norm in float32",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4, bias=False).half(), mesh=init_device_mesh("cpu", (world,)))
    model(torch.full((1, 4), 24576.0, dtype=torch.float16)).float().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 4 * 24576
    print(rank, float(norm.full_tensor()), model.weight.grad.to_local())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
