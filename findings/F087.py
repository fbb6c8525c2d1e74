"""torch `FullyShardedDataParallel.state_dict_type`: an exception inside leaves the type set

The context sets the type back after its body, and not if the body raises. A script that goes on after a strict load
that failed saves state dicts of another type than before. torch 2.13.0. Seen by STATE-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d StateDictType\.SHARDED_STATE_DICT$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    try:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            raise RuntimeError
    except RuntimeError:
        print(rank, FullyShardedDataParallel.get_state_dict_type(model).state_dict_type)  # SHARDED_STATE_DICT
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
