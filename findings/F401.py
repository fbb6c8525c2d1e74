"""torch `get_optimizer_state_dict` with `fully_shard`: after an evaluation it raises KeyError

`get_optimizer_state_dict` of a `fully_shard` model raises `KeyError` after a forward without backward (an evaluation).
It looks for the optimizer's parameters among those that the model has registered, and those of the root are the
unsharded ones then. `model.reshard()` or `model.state_dict()` before the call avoids it.

An evaluation's or one whose backward is still to come; so it is in `get_state_dict` too. Found by making the calls of
CALLS-14 in evaluation.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = '`4` on each rank, and no KeyError.'
# places = [
#     "torch.distributed.checkpoint.state_dict:_get_optim_state_dict",
# ]
# shows = '^0 KeyError'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    try:
        get_optimizer_state_dict(model, optimizer)
    except KeyError as error:
        print(rank, f"KeyError: {error}", flush=True)
    model.reshard()
    print(rank, len(get_optimizer_state_dict(model, optimizer)["state"]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
