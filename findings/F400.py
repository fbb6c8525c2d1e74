"""torch `get_optimizer_state_dict` before the first step counts a step: Adam's first update is another one

`get_optimizer_state_dict` before the first step initializes the optimizer's state by a step with zero gradients and a
learning rate of 0, and leaves the optimizer with the result. `step` is 1 then, so that Adam's first real step corrects
the bias as the second one should: the first update is another one, silently. `get_state_dict` does the same, and so do
the functions that load, unless the loaded state has `step`. No sharding is needed.

A plain module is no exception. Found by making the calls of CALLS-14 before the first step.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp", "torch.replicate_with_fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`step 1, moved by 0.1000` in both lines: reading a state does not change the training.'
# places = [
#     "torch.distributed.checkpoint.state_dict:_init_optim_state",
# ]
# shows = '^with the call before the first step: step 2, '
# ///

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def main():
    for calls in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        if calls:
            get_optimizer_state_dict(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        moved = (before - model.weight.detach()).abs().max().item()
        step = int(optimizer.state[model.weight]["step"])
        print(f"{'with' if calls else 'without'} the call before the first step: step {step}, moved by {moved:.4f}")


if __name__ == "__main__":
    main()
