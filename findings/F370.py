"""torch `set_optimizer_state_dict` of a flattened state dict: a group without parameters raises IndexError

With `flatten_optimizer_state_dict=True` a group is saved by the names of its parameters, and one that has none is not
saved at all. Its options are then looked for under the name of its first parameter. Wherever the group stands, loading
raises `IndexError: list index out of range`; saving does not. Found by looking for other forms of F-369.
"""

# /// finding
# implementations = ["torch"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = "^1 empty groups: IndexError list index out of range"
# unlisted = "flattened state dicts are torch's own alone, and the reference has them from torch too"
# ///

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

options = StateDictOptions(flatten_optimizer_state_dict=True)
for empty in (0, 1):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam([{"params": model.parameters(), "lr": 0.5}] + [{"params": [], "lr": 0.25}] * empty)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=options)
    try:
        set_optimizer_state_dict(model, optimizer, state, options=options)
        print(f"{empty} empty groups:", [group["lr"] for group in optimizer.param_groups])
    except IndexError as error:
        print(f"{empty} empty groups: IndexError", error)
