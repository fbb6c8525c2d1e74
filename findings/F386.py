"""torch `set_optimizer_state_dict`: parameters of one saved group that two groups have now lose their options

For each saved group torch notes one group of the optimizer, the last that has a parameter of it. The others have no
options after a load, not even a learning rate, or, of a full state dict with `fully_shard`, keep their old ones without
a word. Resuming with weight decay for some parameters alone does this. The other way round the group has the options of
one of the saved ones. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch", "torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^sharded: \[None, 0.5\] instead of \[0.5, 0.5\]'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = fully_shard(nn.Linear(4, 4), mesh=mesh)
for form in ("sharded", "full"):
    options = StateDictOptions(full_state_dict=form == "full")
    saved = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=0.5), options=options)
    optimizer = torch.optim.AdamW([{"params": [one]} for one in model.parameters()], lr=0.125)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    print(f"{form}:", [group.get("lr") for group in optimizer.param_groups], "instead of [0.5, 0.5]")
dist.destroy_process_group()
