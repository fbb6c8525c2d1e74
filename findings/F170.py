"""torch `get_state_dict`: whole state dicts share the optimizer's numbers of steps

Tensors without dimensions are not copied, with `full_state_dict` or without, also where `cpu_offload` is asked for and
they lie on the CPU, as Adam's `step` does by default. A state dict that is kept in memory while training goes on has old
moments and a new number of steps then. torch 2.13.0. STATE-10 looks at numbers of steps where an implementation has state
dicts of its own.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["STATE-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d tensor\(2\.\) True$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == 0:
            saved = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))[1]
            before = saved["state"]["weight"]["exp_avg"].clone()
    state = saved["state"]["weight"]
    print(rank, state["step"], torch.equal(state["exp_avg"], before))  # tensor(2.) True
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
