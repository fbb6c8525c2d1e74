"""accelerate's mesh has all ranks of a job

accelerate 1.15.0. A `ParallelismConfig` whose sizes do not make up all processes is refused, and there is no mesh to give in
its place: the ranks of a pipeline's stage cannot be sharded over. Loud. Seen by ACCUMULATION-13, RESUME-6 and STATE-2.
"""

# /// finding
# implementations = ["accelerate.fsdp"]
# requirements = ["ACCUMULATION-13", "RESUME-6", "STATE-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30"]
# packages = ["accelerate>=1.15"]
# shows = '^(\[rank0\]: )?ValueError: ParallelismConfig total_size \(2\) does not match num_processes \(4\)'
# ///

import os

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2))  # of one of two stages
