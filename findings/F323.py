"""torch `set_model_state_dict` beside tensor parallelism: a full state dict of every rank does not load into unequal shards

Sharded over a dimension that tensor parallelism has cut already, five rows a part on two ranks, a parameter has shards of
unequal sizes, which `distribute_tensor` refuses: `AssertionError` without a text. With `broadcast_from_rank0=True` the same
state dict loads, which RESUME-3 checks; no case loads it without, as the reference is loaded by the same function.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["RESUME-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# shows = '^3 AssertionError'
# related = [
#     "https://github.com/pytorch/pytorch/issues/136228 closed: the same for shards that lack rows over the data-parallel ranks alone",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    set_model_state_dict(
        model,
        state if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    try:
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    except AssertionError as error:
        print(rank, type(error).__name__, error, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
