"""torch `set_model_state_dict` with `broadcast_from_rank0`: the first rank alone knows of unknown and missing entries

An entry that the model does not have is left out of what other ranks get, but not on the first rank: strict, this raises
alone, and the others have loaded and go on to a collective that never ends; not strict, it alone returns the key. With
`cpu_offload=True` all ranks raise `KeyError`. Of a model in `DistributedDataParallel` or `torch.compile` the first rank
raises for a missing entry before it sends anything, and the others wait. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch", "torch.fsdp", "ddp"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^1 strict: .*All keys matched'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for name, own in {"strict": {}, "lenient": {"strict": False}, "strict, cpu": {"cpu_offload": True}}.items():
        state = {"weight": torch.ones(4, 4), "bias": torch.ones(4), "stray": torch.ones(2)} if rank == 0 else {}
        try:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **own)
            print(
                rank, f"{name}:", set_model_state_dict(fully_shard(nn.Linear(4, 4)), state, options=options), flush=True
            )
        except (RuntimeError, KeyError) as error:
            print(rank, f"{name}: {type(error).__name__}", str(error).splitlines()[-1].strip(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
