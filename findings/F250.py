"""torch `all_gather_into_tensor_coalesced` over gloo: a segmentation fault for tensors on a GPU

gloo reads the memory of the GPU as if it were the CPU's. DTensors are gathered by this call, so `full_tensor()` and a
whole state dict of `fully_shard` end the process. Ranks that share a GPU (`--ranks-per-gpu 2`) have gloo, because NCCL
refuses them; there the cases that gather DTensors are a `crash`. No expectation excuses them. Seen with torch 2.11.0 on
an H100.
"""

# /// finding
# implementations = ["torch"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 1
# shows = '^torch\.\S+: process \d terminated with signal SIGSEGV'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/152645 open",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (world,))
    weight = distribute_tensor(torch.ones(4, 4, device="cuda"), mesh, [Shard(0)])
    print(weight.full_tensor())  # SIGSEGV
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
