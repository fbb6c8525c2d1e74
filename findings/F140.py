"""megatron-fsdp `fully_shard_optimizer` runs a step of the optimizer on gradients of zeros before training

To create the optimizer's state, it sets all gradients to zeros, those of frozen parameters too, and calls `step()` before
any backward. Adam's counter is then 2 after the first step, which changes the correction of the bias; weights have decayed;
and momentum with dampening begins with zeros in place of the first gradient. megatron-fsdp 0.6.1. Seen by TRAINING-6 at the
parameter after the first step and by OPTIMIZER-1, -2 and -5. Two other defects of the same function, seen by DRAWN-1 and
OPTIMIZER-1: models in float64 raise a KeyError, and an optimizer is refused whose first parameter is not one of the model.
"""

# /// finding
# implementations = ["megatron_fsdp"]
# requirements = ["TRAINING-6", "OPTIMIZER-1", "OPTIMIZER-2", "OPTIMIZER-5", "DRAWN-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["megatron-fsdp==0.6.1"]
# shows = '^\d \[2\.0'
# upstream = [
#     "https://github.com/NVIDIA/Megatron-LM/issues/5974 closed: by a change after 0.6.1",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard_model(nn.Linear(2, 2).cuda(), fsdp_unit_modules=[nn.Linear])
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    print(
        rank, [*(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before))]
    )  # False where it has rows
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    print(rank, [state["step"].item() for state in optimizer.state.values()])  # [2.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
