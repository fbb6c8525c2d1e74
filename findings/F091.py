"""torch `FullyShardedDataParallel.optim_state_dict_to_load`: state of transposed parameters is permuted

The flat parameter has the elements of such a parameter in their order in memory, and what is loaded of optimizer state is
flattened row by row. Silent. torch 2.13.0. Seen by STATE-2. The reproducer prints on each rank what it loads of the
state that it has just saved, and that state: different numbers.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d (tensor\(.*?\)) (?!\1$)tensor'
# related = [
#     "https://github.com/NVIDIA/physicsnemo/pull/1597 merged: PhysicsNeMo permutes what it loads of channels-last parameters, and tells the cause in torch",
#     "https://github.com/pytorch/pytorch/pull/137382 closed: Enable channels_last format for FSDP, which flattens parameters in their order in memory",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    linear = nn.Linear(3, 2, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    model = FSDP(linear, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    optimizer.step()
    state = FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))["state"]
    print(rank, state[0]["momentum_buffer"], optimizer.state_dict()["state"][0]["momentum_buffer"])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
