"""VeOmni's distributed checkpointer raises on a CPU once it has written

veomni 0.1.12. It ends with `empty_cache` of the device's module, here `torch.cpu`, which has none. Loud. VeOmni's data
parallelism and clipping run on a CPU otherwise. Seen by RESUME-5. No report of it was found.
"""

# /// finding
# implementations = ["veomni.fsdp2"]
# requirements = ["RESUME-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["veomni>=0.1.12"]
# shows = '^(\[rank0\]: )?AttributeError: module .torch\.cpu. has no attribute .empty_cache.$'
# ///

import tempfile, torch, torch.distributed as dist
from veomni.checkpoint import build_checkpointer
from veomni.distributed.parallel_state import init_parallel_state

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
init_parallel_state(device_type="cpu")
checkpointer = build_checkpointer(dist_backend="fsdp2", ckpt_manager="dcp")
checkpointer.save(tempfile.mkdtemp(), {"model": torch.nn.Linear(2, 2), "extra_state": {}})
