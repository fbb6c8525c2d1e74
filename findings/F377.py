"""torch `fully_shard`: forward-mode autograd over the inputs of a sharded model raises

Forward-mode autograd (`torch.autograd.forward_ad`) through a sharded model raises if an input requires grad. The
function that registers the post-backward hook returns its inputs as they are, as views; its `jvp` returns the tangents
as they are, and autograd wants tangents that are views too. Without an input that requires grad the function is not
used, and the tangent is right, as it is under `torch.func.jvp`.

Seen by AUTOGRAD-18.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["AUTOGRAD-18"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'The tangent, a tensor of shape (2, 4), as without `fully_shard`.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:RegisterPostBackwardFunction.jvp",
# ]
# shows = '^RuntimeError: A custom Function.s forward is returning a view'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world,)))
    try:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(2, 4, requires_grad=True), torch.ones(2, 4))
            found = forward_ad.unpack_dual(model(x)).tangent
    except (NotImplementedError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
    if rank == 0:
        print(found, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
