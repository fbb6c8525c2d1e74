"""torch `set_optimizer_state_dict`: of an optimizer without states, options go to groups by their places

A state dict without any state is taken for one by numbers (`all(...)` of no keys), whose groups are not looked for by the
names of their parameters. Groups in another order exchange their options, in silence. Of two optimizers, such as two
SGDs without momentum, each is given all groups: `ValueError: loaded state dict has a different number of parameter
groups`; with FSDP1 `KeyError`. Found by looking for other forms of F-382.
"""

# /// finding
# implementations = ["torch", "torch.fsdp"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^another order: \[0.25, 0.5\] instead of \[0.5, 0.25\]'
# unlisted = "the reference is saved and loaded by the same functions, and the case leaves it out"
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = fully_shard(nn.Linear(4, 4), mesh=mesh)
groups = [{"params": [one], "lr": rate} for one, rate in zip(model.parameters(), (0.5, 0.25))]
optimizer = torch.optim.SGD(groups)
state = get_optimizer_state_dict(model, optimizer)
state["param_groups"].reverse()
set_optimizer_state_dict(model, optimizer, state)
print("another order:", [group["lr"] for group in optimizer.param_groups], "instead of [0.5, 0.25]")
two = [torch.optim.SGD([one], lr=0.5) for one in model.parameters()]
try:
    set_optimizer_state_dict(model, two, get_optimizer_state_dict(model, two))
except ValueError as error:
    print("two optimizers: ValueError", error)
dist.destroy_process_group()
