"""torch `fully_shard`: after a forward that raised, a step is not seen by the next forward without `reset_iter_state`

A forward raises, user code catches the error (a batch that does not fit, say), steps the optimizer with the gradients
of earlier batches and goes on, without `reset_iter_state()`. The units that do not reshard after forward, and the one
that raised, are still unsharded, and stay so: the next forward and backward compute with the values from before the
step, silently. `reset_iter_state()` avoids it, and from 2.15 on it also drops the accumulated gradients.

F-71 is that of FSDP1, F-29 that of an evaluation. Seen by RECOVERY-4.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["RECOVERY-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = 'Twice the same number: the failed forward changes nothing of the next one.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.unshard",
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_pre_forward",
# ]
# shows = '^(\S+), after a forward that raised (?!\1$)\S+$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def output(world, *, raises):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    if raises:
        try:
            model(torch.ones(1, 3))  # an input of another size
        except RuntimeError:
            pass
    optimizer.step()
    return model(torch.ones(1, 4)).item()


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    right, found = output(world, raises=False), output(world, raises=True)
    if rank == 0:
        print(f"{right:.4f}, after a forward that raised {found:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
