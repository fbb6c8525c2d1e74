"""torch `rekey_optim_state_dict`: groups keep the saved order, so that numbers match other parameters

It replaces names by numbers and leaves the groups in the order in which they were saved. An unsharded model's optimizer
whose groups are in another order matches them by position: options and states go to the wrong parameters, silently. The
reproducer shows the options. torch 2.13.0. Seen by CALLS-6.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d \[4\.0, 6\.0\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType


def optimizer(model, *names):
    named = {name.split(".")[-1]: parameter for name, parameter in model.named_parameters()}
    return torch.optim.SGD([{"params": [named[name]], "lr": float(len(name))} for name in names], momentum=0.9)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    plain = nn.Linear(4, 4)
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    given, taking = optimizer(model, "bias", "weight"), optimizer(plain, "weight", "bias")
    state = FullyShardedDataParallel.full_optim_state_dict(model, given, rank0_only=False)
    kind = OptimStateKeyType.PARAM_ID
    taking.load_state_dict(FullyShardedDataParallel.rekey_optim_state_dict(state, kind, plain, optim=taking))
    print(rank, [group["lr"] for group in taking.param_groups])  # of weight and bias: [4.0, 6.0], not [6.0, 4.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
