"""torch `FullyShardedDataParallel`: a state dict of the first rank alone has ignored parameters on all ranks

With `rank0_only` the other ranks' state dicts are empty, but for ignored parameters, and for buffers of a wrapper that
has no parameters of its own. torch 2.13.0. Seen by STATE-3 and CALLS-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-3", "CALLS-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^1 \[.bias.\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    linear = nn.Linear(2, 2)
    options = {"ignored_states": [linear.bias], "use_orig_params": True, "device_id": torch.device("cpu")}
    model = FSDP(linear, **options)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        print(rank, [*model.state_dict()])  # 0 ['bias', 'weight'], 1 ['bias']
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
