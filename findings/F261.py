"""torch `FullyShardedDataParallel`: where nothing is sharded, every rank has the state dict of the first rank

Under `NO_SHARD` `rank0_only` changes nothing. torch 2.13.0. Seen by STATE-2.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^1 \[.weight., .bias.\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
    StateDictType,
)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    strategy = ShardingStrategy.NO_SHARD
    model = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=strategy)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        print(rank, [*model.state_dict()])  # ['weight', 'bias'] on both
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
