"""torch `set_model_state_dict` of a full state dict into `fully_shard`: a module in two places is refused

The function makes shards of the full values under the names that it finds, and it visits a module in two places once. Under
its second name the state dict still has full values, which are refused; with `broadcast_from_rank0` the other ranks lack
them. So what `get_model_state_dict` returns with the same options cannot be loaded. FSDP1 is refused with
`broadcast_from_rank0`, and so are the replicas of `replicate()`. Seen beside STATE-14.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp", "torch.replicate", "torch.replicate_with_fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.11.0 cpu 2026-11-30", "torch 2.13.0 cpu 2026-11-30", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# shows = '^full: .*Error'
# ///

import tempfile, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), nn.Linear(4, 3), nn.Sequential(shared))
    fully_shard(model)
    full = StateDictOptions(full_state_dict=True)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = get_model_state_dict(model, options=full)
    for name, options in {"full": full, "sent": sent}.items():
        try:
            set_model_state_dict(model, dict(state) if name == "full" or rank == 0 else {}, options=options)
            print(f"{name}: loaded on rank {rank}", flush=True)
        except Exception as error:
            print(f"{name}: rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:160]}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
