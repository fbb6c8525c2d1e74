"""torch `FullyShardedDataParallel`: optimizer states that the first rank of each replica saved cannot be loaded by their group

`optim_state_dict` with `rank0_only` and a group saves on the first rank of that group. `optim_state_dict_to_load` with the
same group broadcasts from global rank 0, `src=0` instead of `group_src=0`: a group without that rank raises ValueError.
torch 2.13.0. Seen by CALLS-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^[23] Global rank 0 is not part of group'
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
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = FSDP(nn.Linear(2, 2), half, device_id=torch.device("cpu"), use_orig_params=True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config):
        state = FSDP.optim_state_dict(model, optim, group=half)
        try:
            FSDP.optim_state_dict_to_load(model, optim, state, group=half)
        except ValueError as error:
            print(rank, error)  # Global rank 0 is not part of group ..., on ranks 2 and 3
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
