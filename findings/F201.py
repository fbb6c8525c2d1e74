"""torch `fully_shard`: `requires_grad` set after an evaluation that leaves units gathered is ignored or lost

With `reshard_after_forward=False`, and by default in the root's unit, an evaluation leaves the unsharded parameters
registered. If user code then calls `requires_grad_(False)` on the sharded parameter, which the optimizer has, the next
forward still uses the unsharded parameter with `requires_grad=True`: the frozen parameter gets a gradient, and the
optimizer moves it.

If it freezes what the module shows, that holds for one step. Where an evaluation has left parameters resharded to a
part of the ranks, freezing what the module shows is lost. torch 2.13.0. Seen by FROZEN-4. Both references did the same,
or did not train what was thawed, until this case existed.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["FROZEN-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`False True`: a frozen parameter has no gradient.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_unsharded_param",
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_unsharded",
# ]
# shows = '^\d False False$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, reshard_after_forward=False)
    held = model[0].weight
    with torch.no_grad():
        model(torch.ones(2, 4))
    held.requires_grad_(False)
    model(torch.ones(2, 4)).sum().backward()
    print(rank, held.requires_grad, held.grad is None)  # False False: frozen, and it has a gradient
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
