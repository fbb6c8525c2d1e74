"""torch `fully_shard`: the `grad_dtype` of a parameter is dropped without a word, and gradients lose bits

The sharded parameter is a new one, without the attribute. Microbatches of 256, 1 and -256 add up to 0 in bfloat16, where a
plain parameter with the `grad_dtype` float32 has a gradient of 1. torch 2.13.0 and 2.14.1; 2.15.0 keeps it. The adapters do
not declare `gradient-dtype` before. Seen by PRECISION-13.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["PRECISION-13"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-27"]
# shows = '^torch.bfloat16 0.0$'
# related = [
#     "https://github.com/pytorch/pytorch/issues/170648 open: the same report",
#     "https://github.com/pytorch/pytorch/pull/197203 closed: the attribute is kept",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    for value in (256.0, 1.0, -256.0):
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    grad = model.weight.grad.to_local()
    print(grad.dtype, grad.flatten()[0].item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
