"""torch `FullyShardedDataParallel`: states of an optimizer that are no tensors cannot be loaded from the first rank

`optim_state_dict_to_load` with `rank0_only=True`, and `scatter_full_optim_state_dict`: once the first rank has sent the
states of a parameter, it moves each back to the CPU by `.cpu()`, and None, a number, a word or a list has no such
method. So momentum that is None, as SGD without momentum saves it, raises on the first rank. Where a tensor was sent
before, the other ranks wait for the next one for ever. Seen by CALLS-13.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-13"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^(?:flat|originals) AttributeError .NoneType. object has no attribute .cpu.$'
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
                self.state[parameter] = {"momentum_buffer": None}


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for originals in (False, True):
        model = FSDP(nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=originals)
        optimizer = Keeps(model.parameters(), {})
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        configs = (FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True))
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            saved = FSDP.optim_state_dict(model, optimizer)
            try:
                FSDP.optim_state_dict_to_load(model, optimizer, saved)
                shown = "loaded"
            except AttributeError as error:
                shown = f"{type(error).__name__} {error}"
        if rank == 0:
            print("originals" if originals else "flat", shown, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
