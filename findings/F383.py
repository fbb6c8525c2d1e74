"""torch FSDP1: states that are no tensors cannot be sent by the first rank

`optim_state_dict_to_load` with `rank0_only=True`, which `set_optimizer_state_dict` takes for `broadcast_from_rank0=True`,
moves each state of a parameter to the CPU on the ranks that do not hold it, or all of them: `AttributeError: 'int' object
has no attribute 'cpu'`, where others wait for the next value. Numbers of steps were numbers before torch 1.12, and a
state may be None. Loaded by each rank they are right. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^0 a number: .*AttributeError'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(
        nn.Linear(4, 4, bias=False), device_id=torch.device("cpu"), use_orig_params=True, sync_module_states=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for name, own in {"tensors": {}, "a number": {"step": 3}}.items():
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        state = {
            "state": {"weight": {"momentum_buffer": torch.ones(4, 4), **own}},
            "param_groups": [{**group, "params": ["weight"]}],
        }
        try:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(model, optimizer, state if rank == 0 else {}, options=options)
            print(rank, f"{name}: loaded", flush=True)
        except Exception as error:
            print(rank, f"{name}: {type(error).__name__}", str(error)[:60], flush=True)
            os._exit(0)  # the other rank may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
