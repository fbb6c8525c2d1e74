"""torch `fully_shard`: `reset_iter_state` raises `AttributeError` before the first forward

`reset_iter_state()` before the first forward raises `AttributeError` about an attribute of `FSDPCommContext`: it
reads state that the first forward makes. A loop with one handler for all exceptions of an iteration gets this
`AttributeError` in place of its own error, for example that of the data loader in the first iteration. The
documentation excludes modules that are not the root, and no time.

It is a defect. torch 2.13.0. Seen by RECOVERY-1.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["RECOVERY-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'Nothing is printed: there is nothing to reset.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._reset_iter_state",
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPCommContext",
# ]
# shows = '^\d .FSDPCommContext. object has no attribute'
# related = [
#     "https://github.com/pytorch/pytorch/pull/196460 open: Clear deferred all-gather state after backward, which also initialises `all_gather_state` with the class",
# ]
# ///

import tempfile, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    try:
        model.reset_iter_state()
    except AttributeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
