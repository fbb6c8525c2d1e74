"""torch `FullyShardedDataParallel`: with `rank0_only=True` all ranks return extra state

The other ranks drop parameters and buffers from their state dicts, and no extra state. torch 2.13.0. Seen by STATE-4.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^1 \[.0\._extra_state.\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType


class Counting(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Sequential(Counting(4, 4)), device_id=torch.device("cpu"))
    config = FullStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        print(rank, list(model.state_dict()))  # rank 1: ['0._extra_state']
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
