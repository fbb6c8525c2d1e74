"""torch `set_state_dict` with `broadcast_from_rank0`: ranks without entries take no part in what the first rank sends

An empty state dict of the model means that the call is about optimizers alone, also where the first rank sends the
model: it waits for ranks that have returned. `set_model_state_dict` takes an empty one, which is what ranks without the
file have. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch", "torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^1 returned'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    full = StateDictOptions(full_state_dict=True)
    state, states = get_state_dict(model, optimizer, options=full)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = (state, states) if rank == 0 else ({}, {})
    try:
        set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=sent)
        print(rank, "returned", flush=True)
    except RuntimeError as error:  # once the other rank has ended
        print(rank, str(error)[:60], flush=True)
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
