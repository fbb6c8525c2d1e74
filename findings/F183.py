"""torch `FullyShardedDataParallel`: local state dicts with `use_orig_params=True` are saved and cannot be loaded

Loading refuses the flat parameters that saving has put into it, beside the parts of the original ones. torch 2.13.0. Seen
by STATE-50 and CALLS-4.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-50", "CALLS-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'Unexpected key\(s\) in state_dict: ._flat_param'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(2, 2), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = model.state_dict()
            try:
                print(rank, model.load_state_dict(state))
            except RuntimeError as error:
                print(rank, error)  # Unexpected key(s) in state_dict: "_flat_param"
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
