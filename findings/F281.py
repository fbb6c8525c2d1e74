"""torch `FullyShardedDataParallel`: an optimizer's groups in another order get each other's options and states

`optim_state_dict_to_load` replaces names by the numbers that the new optimizer has for its parameters, and keeps the groups
in the order in which they were saved. `load_state_dict` matches them by position, not by number: the first group gets the
options that were saved first, and its parameters the states of others, silently. The reproducer shows the options.
torch 2.13.0. Seen by CALLS-6.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d \[6\.0, 4\.0\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def wrapped():
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)


def optimizer(model, *names):
    named = dict(model.named_parameters())
    groups = [{"params": [named["_fsdp_wrapped_module." + name]], "lr": float(len(name))} for name in names]
    return torch.optim.SGD(groups, momentum=0.9)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    saved, loaded = wrapped(), wrapped()
    given, taking = optimizer(saved, "weight", "bias"), optimizer(loaded, "bias", "weight")
    with FullyShardedDataParallel.state_dict_type(saved, StateDictType.SHARDED_STATE_DICT):
        state = FullyShardedDataParallel.optim_state_dict(saved, given)
    with FullyShardedDataParallel.state_dict_type(loaded, StateDictType.SHARDED_STATE_DICT):
        taking.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(loaded, taking, state))
    print(rank, [group["lr"] for group in taking.param_groups])  # of bias and weight: [6.0, 4.0], not [4.0, 6.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
