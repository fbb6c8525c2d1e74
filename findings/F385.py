"""torch `set_optimizer_state_dict`: of a full state dict, what the optimizer lacks is not sharded, or only on the first rank

A state that the optimizer does not have itself, such as `max_exp_avg_sq` where AdamW was made without `amsgrad`, which the
loaded group has, is a full tensor on every rank beside the DTensors of the others: the next step raises. With
`broadcast_from_rank0=True` only the first rank has it, and the same goes for options of groups, such as the `initial_lr` of a
schedule (which raises without, F-311): ranks train on with different options, without an error. A sharded state dict
loads. Seen by STATE-14.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["STATE-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^1 sent: initial_lr None'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4, bias=False))
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), amsgrad=True), options=full)
    optimizer = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, optimizer, saved, options=full)
    print(
        rank, "full:", {key: type(value).__name__ for key, value in optimizer.state[model.weight].items()}, flush=True
    )
    saved = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), options=full)
    saved["param_groups"][0]["initial_lr"] = 0.5
    optimizer = torch.optim.AdamW(model.parameters())
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, saved if rank == 0 else {}, options=sent)
    print(rank, "sent: initial_lr", optimizer.param_groups[0].get("initial_lr"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
