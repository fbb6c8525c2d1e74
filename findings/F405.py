"""torch `fully_shard`: `reshard` does not drop an `unshard` in flight: a forward after the step computes with older values

`unshard(async_op=True)` followed by `reshard()` before anybody waited, as when a prefetched unit is not used after all.
The parameters are still registered as sharded, so `reshard()` does nothing: the result of the all-gather stays pending
and allocated, and the next forward, after the optimizer's step, takes it and computes with the values from before the
step, silently. With `handle.wait()` before `reshard()` it is right.

F-46 is the same buffer after a load. Seen by CALLS-14 and MEMORY-8.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["CALLS-14", "MEMORY-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`3.0` both times.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.reshard",
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard",
# ]
# shows = '^after the step with the unshard dropped 4.0, waited for 3.0'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    found = []
    for waits in (False, True):
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        model = fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        model(torch.ones(1, 4)).sum().backward()
        handle = model.unshard(async_op=True)
        if waits:
            handle.wait()
        model.reshard()
        optimizer.step()
        found.append(model(torch.ones(1, 4))[0, 0].item())
    if rank == 0:
        print(f"after the step with the unshard dropped {found[0]}, waited for {found[1]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
