"""fairscale `FullyShardedDataParallel`: divide factors below one are ignored

`set_gradient_divide_factors(0.5, 1.0, ...)` divides by nothing: a factor is applied only where it is above one, before the reduction
and after it. fairscale 0.4.13. Seen by REDUCTION-1.
The reproducer was not run.
"""

# /// finding
# implementations = ["fairscale.fsdp"]
# requirements = ["REDUCTION-1"]
# gpus = 2
# packages = ["fairscale==0.4.13"]
# shows = '^\d 0\.5 .*2\.0'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import FullyShardedDataParallel
from torch import nn


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    for factor in (4.0, 0.5):
        model = FullyShardedDataParallel(nn.Linear(2, 2, bias=False).cuda())
        model.set_gradient_divide_factors(factor, 1.0, recursive=False)
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        print(rank, factor, next(model.parameters()).grad.tolist())  # 0.5 each, then 2.0 each, which should be 4.0
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
