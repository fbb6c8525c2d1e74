"""torch `FullyShardedDataParallel`: of a model on a part of the ranks, the optimizer's whole state may be saved by none

With `rank0_only` `optim_state_dict` returns the state on rank 0 of the world alone. The first rank of a process group
without that has none. torch 2.13.0. Seen by CALLS-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^2 \[\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    StateDictType,
)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = FSDP(nn.Linear(2, 2), halves[rank // 2], device_id=torch.device("cpu"), use_orig_params=True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config):
        print(rank, [*FSDP.optim_state_dict(model, optim).get("state", {})])  # [] on all ranks but 0, 2 among them
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
