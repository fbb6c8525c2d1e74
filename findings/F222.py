"""torch `DTensor`: one whose local tensor does not begin its storage cannot be copied

A DTensor takes over the offset of its local tensor, so that its address is not 0, by which `copy.deepcopy` and
`torch.distributed.checkpoint.async_save` tell tensors that have memory from those that have none. torch 2.13.0. RESUME-4 saw
it in the reference, most of whose shards lie in the midst of a buffer: no asynchronous save of its models worked. Its state
dicts now have DTensors at the offset 0.
"""

# /// finding
# implementations = ["torch"]
# requirements = ["RESUME-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d+ Attempted to call copy_\(\) on an invalid python storage'
# ///

import copy, tempfile, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for first in (0, 4):
    tensor = DTensor.from_local(torch.arange(8.0)[first : first + 4], mesh, [Shard(0)])
    try:
        print(tensor.data_ptr(), copy.deepcopy(tensor))
    except RuntimeError as error:
        print(tensor.data_ptr(), error)  # "Attempted to call copy_() on an invalid python storage."
dist.destroy_process_group()
