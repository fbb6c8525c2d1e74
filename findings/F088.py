"""torch `FullyShardedDataParallel` with `NO_SHARD`: the optimizer's state dict changes with the next step

A full state dict of the optimizer shares the memory of its state where nothing is sharded, so that what was saved
before a step has the values of after it, and what a script writes there changes the training. torch 2.13.0. Seen by
STATE-10.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d tensor\(\[0\.1900'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    strategy = ShardingStrategy.NO_SHARD
    model = FSDP(nn.Linear(2, 2), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        saved = FSDP.optim_state_dict(model, optimizer)["state"]["bias"]["exp_avg"]
    print(rank, saved)  # 0.1
    optimizer.step()
    print(rank, saved)  # 0.19
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
