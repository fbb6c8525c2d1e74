"""VeOmni's data parallelism has all ranks of a job, in their order

veomni 0.1.12. `ParallelState` refuses other numbers of ranks, and `init_parallel_state` makes the mesh itself: the ranks of
a pipeline's stage, or replicas on hosts whose ranks alternate, cannot be given. Loud. Seen by ACCUMULATION-13 and HYBRID-4.
"""

# /// finding
# implementations = ["veomni.fsdp2"]
# requirements = ["ACCUMULATION-13", "HYBRID-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["veomni>=0.1.12"]
# shows = '^(\[rank0\]: )?ValueError: The product of parallel sizes should be equal to the world size'
# ///

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from veomni.distributed.parallel_state import init_parallel_state

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
init_parallel_state(dp_size=2, device_type="cpu")  # of one of two stages
