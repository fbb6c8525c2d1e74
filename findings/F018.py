"""torch `FullyShardedDataParallel`: whole gradients of offloaded parameters cannot be had over NCCL

`summon_full_params(with_grads=True)` gathers the sharded gradient where it is (`FlatParamHandle.unshard_grad`), and
with `CPUOffload(offload_params=True)` that is the CPU, from which NCCL gathers nothing. The parameters themselves are
moved first. Seen by OFFLOAD-1 over NCCL with torch 2.11.0, where the reproducer was run too, on two H200s; 2.13.0 reads
the same. The adapter of torch.fsdp joins the ranks' parts by itself there, so no case fails for it.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["OFFLOAD-1"]
# reproduces = ["torch 2.11.0 cuda 2026-11-21"]
# gpus = 2
# shows = '^\d Tensors must be CUDA and dense'
# unlisted = "the adapter of torch.fsdp joins the parts of the ranks by itself there, so that no case fails"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), device_id=rank, cpu_offload=CPUOffload(offload_params=True), use_orig_params=True
    )
    model(torch.randn(2, 4)).sum().backward()
    try:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            print(rank, "no error")
    except ValueError as error:
        print(rank, error)  # Tensors must be CUDA and dense
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
