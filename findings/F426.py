"""torch `FullyShardedDataParallel`: a model that is cast after a state dict, or after full parameters, cannot run

The first call that gathers settles the dtype in which the flat parameter is gathered: a forward, a state dict in any form,
or `summon_full_params`. After a cast the next forward raises, because the gathered memory has the dtype of before. A model
that is cast before any of them works. F-180 is the same of `fully_shard` after a forward. torch 2.13.0. Seen by DRAWN-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["DRAWN-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30", "torch 2.15.0 cpu 2026-11-30"]
# shows = '^cast first: works, cast after a state dict: raises'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType


def wrapped(module):
    return FSDP(module, use_orig_params=True, device_id=torch.device("cpu"))


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    found = []
    for saves in (False, True):
        model = wrapped(nn.Linear(4, 4))
        if saves:
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                model.state_dict()
        model.double()
        try:
            model(torch.ones(1, 4, dtype=torch.float64))
            found.append("works")
        except (RuntimeError, ValueError) as error:
            found.append(f"raises {str(error)[:50]}")
    if rank == 0:
        print(f"cast first: {found[0]}, cast after a state dict: {found[1]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
