"""torch `fully_shard`: gradients that are offloaded to the CPU cannot be clipped over NCCL alone

`CPUOffloadPolicy` leaves gradients as DTensors whose local tensors are on the CPU, on a mesh of GPUs. The total norm of
`clip_grad_norm_` is a partial sum there, and its all-reduce raises `No backend type associated with device type cpu`
unless the process group has a second backend, `"cpu:gloo,cuda:nccl"`. Nothing says so before the first clipped step.
torch 2.11.0. Seen by DRAWN-2 over NCCL on two H200.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["DRAWN-2"]
# reproduces = ["torch 2.11.0 cuda 2026-11-27"]
# gpus = 2
# shows = '^\d No backend type associated with device type cpu'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/148532 closed: CPU offload does not work with torch.nn.utils.clip_grad_norm",
#     "https://github.com/pytorch/pytorch/pull/136156 closed: a check of the backend when a model is offloaded",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    try:
        print(rank, nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
    except RuntimeError as error:
        print(rank, error)  # No backend type associated with device type cpu
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
