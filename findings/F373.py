"""torch `ZeroRedundancyOptimizer.load_state_dict`: the states of other ranks' parameters are None in the caller's dict

A rank clears what it does not need in the state dict that it is given. Loaded once more, as into a second optimizer or
after a retry, it is not the state any more: with other ranks for some parameters the load raises or loses moments.
Found by reading; the adapter passes a copy with numbers in place of names, so that no case sees it.
"""

# /// finding
# implementations = ["torch.zero_optimizer"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = '^lost the states of \[\d'
# unlisted = "the adapter passes a copy of the state dict with numbers in place of names"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(0)
    sent = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(sent)
    optimizer.load_state_dict(sent[0])
    if rank == 0:
        print("lost the states of", [number for number, one in sent[0]["state"].items() if one is None], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
