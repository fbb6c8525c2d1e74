"""torch `ZeroRedundancyOptimizer`: over NCCL, a parameter that is not contiguous stops the first step

After its update each rank broadcasts its parameters as they are, and NCCL takes contiguous tensors alone; gloo takes any.
`DistributedDataParallel` trains such a parameter over both. torch 2.11. Seen by INIT-5 on two H200s.
"""

# /// finding
# implementations = ["torch.zero_optimizer"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# shows = '^ValueError: .*ensors must be contiguous'
# related = [
#     "https://github.com/pytorch/pytorch/issues/79043 closed: broadcasts of tensors in the format `channels_last` had stopped working in DDP",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(4, 2, bias=False).cuda()
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()  # ValueError: Tensors must be contiguous


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
