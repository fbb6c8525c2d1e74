"""torch `FullyShardedDataParallel`: with replicas, buffers of the first rank reach its own replica alone

`sync_module_states=True` sends the first rank's values twice with the hybrid strategies, within a replica and then across
replicas. Each buffer is marked when it is sent, so that nested units do not send it again, and the second round leaves
marked ones out: running statistics and other buffers of a replica stay those of its own first rank. Parameters are
right. Seen by COMPOSITION-8 over NCCL on four H200; on the CPU the option is refused (F-13).
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["COMPOSITION-8"]
# gpus = 1
# reproduces = ["torch 2.11.0 cuda 2026-11-29"]
# shows = '^buffers of ranks 0 to 3: \[0.0, 0.0, 2.0, 2.0\]; parameters: \[0.0, 0.0, 0.0, 0.0\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main(rank, world, path):
    torch.cuda.set_device(0)  # four ranks share a GPU, so gloo
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(4, 4, bias=False).cuda()
    nn.init.constant_(model.weight, float(rank))
    model.register_buffer("scale", torch.tensor([float(rank)], device="cuda"))
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard")),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
        device_id=0,
    )
    mine = [next(wrapped.buffers()).item(), next(wrapped.parameters()).flatten()[0].item()]
    every = [None] * world
    dist.all_gather_object(every, mine)
    if rank == 0:
        print(
            f"buffers of ranks 0 to 3: {[one[0] for one in every]}; parameters: {[one[1] for one in every]}", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
