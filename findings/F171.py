"""torch `FullyShardedDataParallel`: on the CPU, a full state dict of an optimizer has one moment for all parameters

`full_optim_state_dict`, and `optim_state_dict` with `offload_to_cpu=True`, which is its default: with original parameters
all states of a parameter are gathered in one buffer, one after the other, and each is "moved" to the CPU, where it is
already. The state dict then has the last for each: as first moment of Adam the second. torch 2.13.0. Seen by STATE-12.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-12"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d (tensor\(.*?\)) \1$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]["bias"]
    print(rank, state["exp_avg"], state["exp_avg_sq"])  # 0.001 twice; the first is 0.1
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
