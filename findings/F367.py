"""accelerate `clip_grad_norm_` with FSDP1: with the parameters of a part of the model, each rank clips by its own part

accelerate 1.15.0. It calls the wrapper's method, which computes the norm over all ranks, only if it is given all
parameters of a prepared model in their order. Those of one unit, or of some groups of the optimizer, go to torch's
`clip_grad_norm_`, which sees this rank's shards: ranks scale by different factors, and no rank says so. The wrapper
itself refuses the call on a unit. Seen by COLLECTIVES-11 on two GPUs; the script was not run.
"""

# /// finding
# implementations = ["accelerate.fsdp1"]
# requirements = ["COLLECTIVES-11"]
# gpus = 2
# packages = ["accelerate==1.15.0"]
# shows = '^the ranks return (.+) and (?!\1)'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn


def main(rank, world, path):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    accelerator.backward(model(torch.ones(1, 8, device="cuda")).square().sum())
    norm = accelerator.clip_grad_norm_(list(model.parameters())[:2], 1e-3)
    norms = [torch.zeros_like(norm) for _ in range(world)]
    dist.all_gather(norms, norm)
    if rank == 0:
        print("the ranks return", " and ".join(f"{one.item():.6g}" for one in norms))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
