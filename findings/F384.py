"""torch `set_optimizer_state_dict` with FSDP1 and a compiled submodule: names are replaced within others, or not sent

FSDP1 is given names with `_orig_mod`, which replace those without wherever these occur: of a compiled module `a` the
name `a.weight` is found in `ba.weight` too, and loading raises `KeyError: 'ba._orig_mod.weight'`. With
`broadcast_from_rank0=True` all ranks but the first have no groups in which to replace anything, raise `KeyError:
'param_groups'`, and the first waits for them. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^\d full: KeyError .ba._orig_mod.weight'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Module()
    model.a, model.ba = torch.compile(nn.Linear(4, 4)), nn.Linear(4, 4)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    full = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=full)
    for name, options in {
        "full": full,
        "sent": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    }.items():
        try:
            given = state if rank == 0 or name == "full" else {}
            set_optimizer_state_dict(model, optimizer, given, options=options)
            print(rank, f"{name}: loaded", flush=True)
        except (KeyError, RuntimeError) as error:  # the second once the other rank has ended
            print(rank, f"{name}: {type(error).__name__}", str(error)[:60], flush=True)
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
