"""torch `fully_shard`: a forward uses values that an `unshard` in flight gathered before a load

After `unshard(async_op=True)`, `load_state_dict` changes the shards, and the all-gather that is still pending has the
values from before. The next forward waits for that all-gather and computes with the old values, silently. Without
`async_op` the loaded values are used.

torch 2.13.0. Seen by STATE-5.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["STATE-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = 'Zeros, the values that were loaded; it prints the output of the values from before.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._register_state_dict_hooks",
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard",
# ]
# shows = '^\d tensor\(\[\[.*[1-9]'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(2, 2, bias=False))
    x = torch.ones(1, 2)
    state = {name: value * 0 for name, value in model.state_dict().items()}
    handle = model.unshard(async_op=True)
    model.load_state_dict(state)
    print(rank, model(x))  # zeros are right
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
