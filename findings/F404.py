"""torch `FullyShardedDataParallel` beside tensor parallelism: an optimizer's state dict loads the states of other ranks

`optim_state_dict_to_load` takes back what `optim_state_dict` has just returned, and the momentum of parameters that tensor
parallelism has cut is another rank's afterwards, silently; so it is with full and with sharded ones. Model state dicts are
loaded right. Seen by CALLS-14.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-14"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^ranks with another momentum than before: .*1'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    before = [one["momentum_buffer"].clone() for one in optimizer.state.values()]
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    after = [one["momentum_buffer"] for one in optimizer.state.values()]
    same = all(map(torch.equal, before, after))
    everyone = [None] * world
    dist.all_gather_object(everyone, same)
    if rank == 0:
        print("ranks with another momentum than before:", [i for i, one in enumerate(everyone) if not one])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
