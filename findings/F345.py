"""torch `fully_shard`: on a mesh whose data-parallel dimension is not the first, `spmd_types` of parameters are refused

`_resolve_spmd_types_for_storage` collects the types of the data-parallel dimensions first, then the others, and takes that
order for the order of the mesh's dimensions. A parameter that is `S(0)` on the first dimension, `tp`, seems to be cut over
the second, `dp`. The parameters as DTensors are taken on the same mesh. Needs the package `spmd_types`: seen with 0.2.3 and 0.3.1, on a
group that sends nothing ("fake") and on gloo, torch 2.15.0. Seen by COMPOSITION-19.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COMPOSITION-19"]
# packages = ["spmd-types==0.2.3"]
# since = "2.15"
# reproduces = ["torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# shows = "^dp, tp: sharded\\ntp, dp: ValueError: Expected Replicate\\(\\) on DP shard dim 'dp' .index 1. but got S"
# ///

import spmd_types, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard

dist.init_process_group("fake", rank=1, world_size=4)
for names in (("dp", "tp"), ("tp", "dp")):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = nn.Linear(1, 4, bias=False)
    kinds = {mesh.get_group("dp"): spmd_types.R, mesh.get_group("tp"): spmd_types.S(0)}
    spmd_types.assert_type(model.weight, kinds)
    try:
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        print(f"{', '.join(names)}: sharded")
    except ValueError as error:
        print(f"{', '.join(names)}: ValueError: {error}")
dist.destroy_process_group()
