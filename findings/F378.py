"""torch `get_model_state_dict`: `submodules` with `ignore_frozen_params` raises where others have frozen parameters

The names of all frozen parameters of the model are removed from a state dict which has those of some submodules alone:
`KeyError`. So the adapter of a model with a frozen base cannot be saved by itself. With
`keep_submodule_prefixes=False`, where no entry has the name that is removed, it raises in any case.
Seen by STATE-14.
"""

# /// finding
# implementations = ["torch", "torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^frozen outside: KeyError'
# ///

import tempfile, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model[0].weight.requires_grad_(False)
model = fully_shard(model, mesh=mesh)
for name, module in {"frozen outside": model[1], "frozen inside": model[0]}.items():
    try:
        options = StateDictOptions(ignore_frozen_params=True)
        print(f"{name}:", [*get_model_state_dict(model, submodules={module}, options=options)])
    except KeyError as error:
        print(f"{name}: KeyError", error)
dist.destroy_process_group()
