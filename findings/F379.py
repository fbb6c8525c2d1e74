"""torch `set_model_state_dict`: of a full state dict an entry that is missing is not noticed

With `full_state_dict=True` the model's own values take the places of all entries that the state dict lacks, before it is
loaded. A strict load of half of a checkpoint passes in silence, and one that is not strict returns no missing keys.
A sharded state dict, and `broadcast_from_rank0=True` if strict, report them. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch", "torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^full, strict: .*All keys matched'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for form in ("sharded", "full"):
    for strict in (True, False):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        state = {"weight": torch.ones(4, 4) if form == "full" else model.weight}
        try:
            options = StateDictOptions(full_state_dict=form == "full", strict=strict)
            result = set_model_state_dict(model, state, options=options)
        except RuntimeError as error:
            result = str(error).splitlines()[-1].strip()
        print(f"{form}, {'strict' if strict else 'lenient'}:", result)
dist.destroy_process_group()
