"""torch `set_model_state_dict`: a full state dict of a module that is registered in two places raises

A full state dict that `get_model_state_dict` returns for a model in which one module is registered under two names
cannot be loaded by `set_model_state_dict` with the same options. The loader distributes the values for the names that
`named_parameters()` lists, which has each parameter once; the full tensors of the second name are left, and
`load_state_dict` raises `got mixed torch.Tensor and DTensor`. A parameter that two different modules share loads.

It serves every model with DTensors, the reference too. F-427 is it on two ranks. Found by making the calls of CALLS-14.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = '`loaded`.'
# places = [
#     "torch.distributed.checkpoint.state_dict:_load_model_state_dict",
#     "torch.distributed._state_dict_utils:_distribute_state_dict",
# ]
# shows = "^RuntimeError: .* got mixed torch.Tensor and DTensor"
# ///

import tempfile, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first


dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = fully_shard(Twice(), mesh=init_device_mesh("cpu", (1,)))
options = StateDictOptions(full_state_dict=True)
try:
    set_model_state_dict(model, get_model_state_dict(model, options=options), options=options)
    print("loaded")
except RuntimeError as error:
    print("RuntimeError:", " ".join(str(error).split()))
dist.destroy_process_group()
