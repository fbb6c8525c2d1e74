"""torch `FullyShardedDataParallel.optim_state_dict_to_load`: an optimizer of fewer parameters raises KeyError

The groups of the saved state dict are translated entry by entry, and an entry of a parameter that the optimizer lacks,
such as a frozen one, raises. Optimizers of `fully_shard` take such a state dict. torch 2.13.0. Seen by STATE-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d KeyError\(.bias.\)$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    linear = nn.Linear(2, 2)
    linear.bias.requires_grad_(False)
    model = FSDP(linear, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)
    other = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
    try:
        FSDP.optim_state_dict_to_load(model, other, saved)
    except KeyError as error:
        print(rank, repr(error))  # KeyError('bias')
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
