"""torch `FullyShardedDataParallel` beside tensor parallelism: sharded state dicts of uneven sizes abort

Under `FullyShardedDataParallel` beside tensor parallelism, a sharded state dict cannot be saved and loaded if the
dimension that tensor parallelism has cut does not divide by the ranks (here 9 output features on a 2 x 2 mesh; 11 fails
while saving, 10 and 12 work). Ranks exchange tensors of different sizes; over gloo they end with SIGABRT: "Received
data size doesn't match expected size".

Seen by RESUME-1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["RESUME-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'Each rank prints `saved` and `loaded`, as with 10 or 12 instead of 9.'
# places = [
#     "torch.distributed.tensor.parallel.fsdp:_chunk_dtensor",
#     "torch.distributed.tensor.parallel.fsdp:_all_gather_dtensor",
# ]
# arguments = ["9"]
# shows = 'terminate called after throwing an instance of .gloo::EnforceNotMet'
# related = [
#     "https://github.com/pytorch/pytorch/pull/123812 closed: Fix FSDP1 2D extension checkpoint uneven sharded DTensor, for the shape alone",
# ]
# ///

import sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main(rank, world, width, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, width, bias=False))
    original = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    sharded = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True
    )
    FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    state = sharded.state_dict()
    print(rank, "saved", state["0.weight"].to_local().shape, state["0.weight"].placements, flush=True)
    sharded.load_state_dict(state)
    print(rank, "loaded", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, int(sys.argv[1]), tempfile.mktemp()), nprocs=4)
