"""torch `fully_shard`: parameters that cannot be resharded to a smaller size are refused in the midst of a forward

`reshard_after_forward=2` at world 4, beside tensor parallelism. The unit has been gathered and has computed when the
forward raises "Resharding to smaller mesh is not supported for DTensor parameters yet", and so does the next. Gather hooks
of a shard (`fsdp_pre_all_gather`) are refused at the same place, by an assertion about the number of gathered tensors.
torch 2.13.0. Seen by COMPOSITION-16 and EXTENSION-3.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COMPOSITION-16", "EXTENSION-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# shows = '^\d \[.*\] .*Resharding to smaller mesh is not supported for DTensor parameters yet'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"], reshard_after_forward=2)
    fully_shard(model, mesh=mesh["dp"])
    called = []
    model[0].register_forward_hook(lambda *_: called.append("computed"))
    for _ in range(2):
        try:
            model(torch.ones(2, 4)).sum().backward()
        except Exception as error:
            print(rank, called, type(error), error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
