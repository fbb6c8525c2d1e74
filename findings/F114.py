"""torch `set_model_state_dict` with DDP: a module with two names is not found under the second

`get_model_state_dict` of a `DistributedDataParallel` drops the prefix `module.` from all names, and
`set_model_state_dict` puts it back before those of `named_parameters()`, which have a shared module once. Its other name
is missing and unknown at once. torch 2.13.0. Seen by STATE-2. The reproducer prints the error.
"""

# /// finding
# implementations = ["torch.zero_optimizer", "ddp"]
# requirements = ["STATE-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d Error\(s\) in loading state_dict for DistributedDataParallel'
# ///

import tempfile, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4))
    model.again = model[0]
    wrapped = DistributedDataParallel(model)
    state = get_model_state_dict(wrapped)
    print(rank, list(state))
    try:
        set_model_state_dict(wrapped, state)
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
