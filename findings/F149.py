"""fairscale `FullyShardedDataParallel`: an evaluation after a step uses old values

What stays gathered after a forward without backward, the root's parameters by default, is not gathered anew after a
step. fairscale 0.4.13. Seen by EVALUATION-2 and -3, OPTIMIZER-1 and -3. Further, each with a case in the file of
expectations: parameters of one unit of which some are frozen are refused, and all but the root frozen leaves whole
gradients; a parameter of two units is trained twice; models in float64 are refused with a message about FP16;
backward gathers no unit ahead; memory of what a wrapper lists grows with each step; gradients that a script drops
between two backwards are counted once more; what is refused is refused after the units inside have communicated; casts,
and parameters that are put in place of others, are not followed; units that are not resharded stay gathered from one
unreduced microbatch to the next; a module registers no parameters but flat ones. The reproducer prints True.
"""

# /// finding
# implementations = ["fairscale.fsdp"]
# requirements = ["EVALUATION-2", "EVALUATION-3", "OPTIMIZER-1", "OPTIMIZER-3"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["fairscale==0.4.13"]
# shows = '^\d True$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import FullyShardedDataParallel
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(2, 2).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 2, device="cuda")
    model(x).sum().backward()
    with torch.no_grad():
        before = model(x)
        optimizer.step()
        print(rank, torch.equal(model(x), before))  # True
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
