"""torch `set_model_state_dict`: ranks load other values of a transposed tensor with `broadcast_from_rank0`, without an error

`set_model_state_dict` with `full_state_dict=True, broadcast_from_rank0=True` and a tensor that is not contiguous, such
as the transpose in a converted checkpoint: rank 0 broadcasts the tensor as it is. Over gloo it goes out in the order of
its memory, and the other ranks receive into contiguous tensors: they load the elements in another order, silently, and
ranks train from different weights. `.contiguous()` before the broadcast would mend it.

A sharded parameter is right on the first rank's shard alone. Found by STATE-14.
"""

# /// finding
# implementations = ["reference", "torch.fully_shard", "torch.fsdp", "ddp", "torch.replicate", "torch.replicate_with_fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = 'Rank 1 loads what rank 0 loads: `[[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]`.'
# places = [
#     "torch.distributed._state_dict_utils:_broadcast_tensors",
#     "torch.distributed._state_dict_utils:_broadcast_state_dict",
# ]
# shows = "^rank 1 loads: \\[\\[0.0, 1.0, 2.0\\], \\[3.0, 4.0, 5.0\\]\\]"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model, weight = nn.Linear(3, 2, bias=False), torch.arange(6.0).view(3, 2).t()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {"weight": weight} if rank == 0 else {}, options=options)
    print(f"rank {rank} loads: {model.weight.tolist()}", flush=True)
    if rank == 0:
        print(f"it should be:  {weight.tolist()}", flush=True)


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
