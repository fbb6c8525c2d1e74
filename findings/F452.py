"""torch `fully_shard`: over NCCL a divide factor that is a power of two makes gradients in bfloat16 zero

`set_gradient_divide_factor(16)` with a reduce dtype of bfloat16 reduces with an operator that multiplies each gradient by
1/16 before the sum; what arrives is zero, in silence. torch 2.11.0, NCCL 2.28.9. Seen by REDUCTION-13 on four
H200, on shards and on replicas of shards. The script was not run in this form.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REDUCTION-13"]
# gpus = 2
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/190745 closed: bfloat16 NCCL PREMUL_SUM silently zeroes the reduction for power-of-two factors",
#     "https://github.com/pytorch/pytorch/pull/190747 closed: its fix, Fix bfloat16 NCCL PREMUL_SUM factor being read as zero",
# ]
# shows = '^gradient of ones, divided by 3 and by 16: 0\.6\d+ and 0\.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def gradient(factor):
    model = nn.Linear(8, 8, bias=False).cuda()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    model.set_gradient_divide_factor(factor)
    model(torch.ones(1, 8, device="cuda")).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item()


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    by_three, by_sixteen = gradient(3.0), gradient(16.0)
    if rank == 0:
        print(f"gradient of ones, divided by 3 and by 16: {by_three} and {by_sixteen}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
