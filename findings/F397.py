"""torch `FullyShardedDataParallel` with `SHARD_GRAD_OP`: between forward and backward the optimizer's state is not saved

With original parameters, a unit that stays gathered until backward has tensors in place of its parameters, so that
`optim_state_dict`, `full_optim_state_dict` and loads find none of the optimizer's parameters in the model and raise
KeyError, whose text is a parameter. FULL_SHARD saves and loads there. Seen by CALLS-14.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^FULL_SHARD saves 2, SHARD_GRAD_OP KeyError$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


def saved(strategy):
    model = FSDP(
        nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    output = model(torch.ones(2, 4))
    try:
        found = f"saves {len(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)['state'])}"
    except KeyError:
        found = "KeyError"
    output.sum().backward()
    return found


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    found = [f"{strategy} {saved(strategy)}" for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")]
    if rank == 0:
        print(", ".join(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
