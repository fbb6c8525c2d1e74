"""torch `set_optimizer_state_dict`: the full state dict of an optimizer without states raises

The device is that of a tensor of state, of which SGD without momentum has none: `AssertionError: Expected device to be
set`, for `full_state_dict=True`, sent by the first rank or not. FSDP1 loads it. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^full: AssertionError Expected device to be set'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = fully_shard(nn.Linear(4, 4), mesh=mesh)
for name, optimizer in {
    "full": torch.optim.SGD(model.parameters(), lr=0.5),
    "full, momentum": torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
}.items():
    options = StateDictOptions(full_state_dict=True)
    try:
        set_optimizer_state_dict(
            model, optimizer, get_optimizer_state_dict(model, optimizer, options=options), options=options
        )
        print(f"{name}: loaded")
    except AssertionError as error:
        print(f"{name}: AssertionError", error)
dist.destroy_process_group()
