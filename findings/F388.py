"""torch `set_model_state_dict`: tied parameters of a model on the meta device come apart

`set_model_state_dict` with `full_state_dict=True` into a model on the meta device assigns the values to each name by
itself. A parameter that two modules share, such as the embedding and the output layer of a language model, is two
parameters afterwards: the optimizer has both, and they train apart, silently. On a device, where values are copied, it
stays one.

Seen by STATE-14.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`1 parameters` for both devices.'
# places = [
#     "torch.distributed.checkpoint.state_dict:_load_model_state_dict",
#     "torch.distributed._state_dict_utils:_distribute_state_dict",
# ]
# shows = '^meta: 2 parameters'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for device in ("cpu", "meta"):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    state = {"0.weight": torch.ones(4, 4), "1.weight": torch.ones(4, 4)}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    print(f"{device}:", len([*model.parameters()]), "parameters")
dist.destroy_process_group()
