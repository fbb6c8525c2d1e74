"""torch `get_model_state_dict` of FSDP1: full values on the CPU without frozen parameters raise on all ranks but the first

With `full_state_dict`, `cpu_offload` and `ignore_frozen_params` the other ranks have an empty state dict, from which the
names of frozen parameters are taken out: KeyError, while the first rank goes on and waits in its next collective. Seen by
STATE-14 over NCCL; on the CPU the cases leave this form out (F-41).
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-30"]
# shows = "^rank 1: KeyError: '0.weight'"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    wrapped = FullyShardedDataParallel(
        model, device_mesh=init_device_mesh("cpu", (world,)), device_id=torch.device("cpu"), use_orig_params=True
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    try:
        print(f"rank {rank}: {[*get_model_state_dict(wrapped, options=options)]}", flush=True)
    except KeyError as error:
        print(f"rank {rank}: KeyError: {error}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
