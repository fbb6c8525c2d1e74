"""torch `set_optimizer_state_dict`: options are lost where a group without parameters is not the last

The saved group without parameters is looked for in a loop, and the last group of the loop is taken in place of the one
that was found. Of a sharded state dict, and of every one with FSDP1, the group that should have had the last one's
options has none: `KeyError: 'lr'`. With full ones and `fully_shard` the empty group silently keeps the options that it
had before the load, and gives them to parameters that user code adds to it. Seen by CALLS-6 through FSDP1.
"""

# /// finding
# implementations = ["torch", "torch.fsdp"]
# requirements = ["CALLS-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = "^sharded, first: KeyError 'lr'$"
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def trained(place, factor):
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    groups = [{"params": [one], "lr": rate * factor} for one, rate in zip(model.parameters(), (0.5, 0.25))]
    groups.insert(place, {"params": [], "lr": 0.125 * factor})
    optimizer = torch.optim.Adam(groups)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
for form in ("sharded", "full"):
    options = StateDictOptions(full_state_dict=form == "full")
    for place, name in enumerate(("first", "between", "last")):
        state, (model, optimizer) = get_optimizer_state_dict(*trained(place, 1), options=options), trained(place, 10)
        try:
            set_optimizer_state_dict(model, optimizer, state, options=options)
            print(
                f"{form}, {name}:", [group["lr"] for group in optimizer.param_groups]
            )  # full: of the empty group 1.25
        except KeyError as error:
            print(f"{form}, {name}: KeyError", error)
dist.destroy_process_group()
