"""torch `set_model_state_dict`: a module whose extra state is missing is given an object of torch's own

Where a full state dict lacks the extra state of a module, which older files do, and the load is not strict or each rank
has the state dict, `set_extra_state` is called with the mark that torch has in its place: an object of `_EXTRA_STATE`.
`nn.Module` does not call it, and returns the key as missing. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch", "torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^full, lenient: .*_EXTRA_STATE'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


class Counting(nn.Linear):
    given = "not called"

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        self.given = state


for form in ("plain, lenient", "full, lenient"):
    model, state = Counting(4, 4), {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    if form.startswith("plain"):
        model.load_state_dict(state, strict=False)
    else:
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(fully_shard(model, mesh=mesh), state, options=options)
    print(f"{form}:", model.given)
dist.destroy_process_group()
