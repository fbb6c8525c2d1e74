"""torch `set_optimizer_state_dict` of a full state dict: an option of a group that the optimizer lacks raises KeyError

A schedule adds `initial_lr` to the groups of an optimizer. Where all ranks have the full state dict, torch copies such an
option among the local ones without its place in the groups, and raises `KeyError: 'param_groups.0.initial_lr'`. With
`broadcast_from_rank0=True` the option is loaded. Seen by STATE-3.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["STATE-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = "^'param_groups.0.initial_lr'"
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def trained():
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
(saved, optimizer), (loaded, other) = trained(), trained()
torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
options = state_dict.StateDictOptions(full_state_dict=True)
state = state_dict.get_optimizer_state_dict(saved, optimizer, options=options)
try:
    state_dict.set_optimizer_state_dict(loaded, other, state, options=options)
    print(other.param_groups[0]["initial_lr"])
except KeyError as error:
    print(error)
dist.destroy_process_group()
