"""torch `FullyShardedDataParallel`: lists and dicts in states of flat parameters are saved and cannot be loaded

`optim_state_dict_to_load` compares the states of the parameters of one flat parameter by a set of their values, and a
list or a dict cannot be in a set. With original parameters they are loaded, but for `rank0_only=True` (F-390). Seen by
CALLS-13.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-13"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^flat TypeError unhashable type: .list.$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Keeps(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter] = {"betas": [0.9, 0.99]}


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for originals in (False, True):
        model = FSDP(nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=originals)
        optimizer = Keeps(model.parameters(), {})
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        configs = (FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False))
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            saved = FSDP.optim_state_dict(model, optimizer)
            try:
                FSDP.optim_state_dict_to_load(model, optimizer, saved)
                shown = "loaded"
            except TypeError as error:
                shown = f"{type(error).__name__} {error}"
        if rank == 0:
            print("originals" if originals else "flat", shown, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
