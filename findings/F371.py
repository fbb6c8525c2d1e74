"""torch `set_optimizer_state_dict`: a flattened full state dict, which torch saves, cannot be loaded

`full_state_dict=True` with `flatten_optimizer_state_dict=True` is saved by names. Loading first makes an unflattened
state dict of it, which is compared with a flattened one of the optimizer: `KeyError: 'param_groups.0.params.0'`, and
with `broadcast_from_rank0=True` `KeyError: 'state'`. FSDP1, whose state dicts go another way, loads it. Found by
looking for other forms of F-370.
"""

# /// finding
# implementations = ["torch"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = "^full: KeyError 'param_groups.0.params.0'$"
# unlisted = "no adapter has this form of state dicts"
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

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
forms = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "of the first rank": {"full_state_dict": True, "broadcast_from_rank0": True},
}
for name, form in forms.items():
    options = StateDictOptions(flatten_optimizer_state_dict=True, **form)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    try:
        set_optimizer_state_dict(model, optimizer, state, options=options)
        print(f"{name}: loaded")
    except KeyError as error:
        print(f"{name}: KeyError", error)
dist.destroy_process_group()
