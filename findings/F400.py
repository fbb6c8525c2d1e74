"""torch `get_optimizer_state_dict` before the first step counts a step: Adam's first update is another one

To have a state to return, it makes one by a step with gradients of zeros and a learning rate of 0, and leaves the
optimizer with it. Averages of zeros change nothing, but `step` is 1 then, so that the first step of the training corrects
the bias as the second would. So do `get_state_dict` and, unless they restore `step`, both functions that load. A plain
module is no exception. Found by making the calls of CALLS-14 before the first step.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp", "torch.replicate_with_fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
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
