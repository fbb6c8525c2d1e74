"""accelerate: FSDP2 with `cpu=True` is plain `DistributedDataParallel`

accelerate 1.15.0. `Accelerator(cpu=True, fsdp_plugin=...)` drops the plugin without a word, and `prepare` wraps the model
in DDP: nothing is sharded. The adapter is refused on a CPU; `tests/harness/test_naive_adapters.py` has one that claims to
shard, and fails at the stage sharding ("the model is not sharded").
"""

# /// finding
# implementations = ["accelerate.fsdp"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["accelerate>=1.15"]
# shows = '^\d \S*MULTI_CPU DistributedDataParallel$'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp


def main(rank, world, path):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    print(rank, accelerator.distributed_type, type(model).__name__)  # MULTI_CPU DistributedDataParallel
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
