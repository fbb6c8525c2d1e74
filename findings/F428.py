"""torch `FullyShardedDataParallel.optim_state_dict(group=...)`: a group without rank 0 is refused, where parameters are flat

With `use_orig_params=False` the function sends what the group's first rank knows of the optimizer's parameters from global
rank 0, whatever the group. On all ranks of a group that rank 0 is not in, it raises. Without `group`, it takes the default group.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30"]
# shows = '^rank 3: ValueError: Global rank 0 is not part of group'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"), process_group=group, use_orig_params=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    try:
        FSDP.optim_state_dict(model, optimizer, group=group)
        print(f"rank {rank}: saved", flush=True)
    except ValueError as error:
        print(f"rank {rank}: ValueError: {str(error)[:80]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
