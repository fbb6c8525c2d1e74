"""torch FSDP1 with original parameters: the optimizer's state cannot be saved where one parameter has two dtypes in it

`optim_state_dict` gathers the states of a parameter by one dtype, which it takes from the first of them, and raises
AssertionError at the next one of another: first moments in bfloat16 next to second ones in float32, as optimizers with
smaller states have them. Full and sharded state dicts alike; with flat parameters both dtypes are saved. Seen by
STATE-3.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = '^originals AssertionError Expected dtype == info.dtype, got torch.bfloat16 != torch.float32$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType


class Moments(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter] = {"first": parameter.grad.bfloat16(), "second": parameter.grad.square()}
                parameter.sub_(parameter.grad)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for originals in (False, True):
        model = FSDP(nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=originals)
        optimizer = Moments(model.parameters(), {})
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        try:
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                states = FSDP.optim_state_dict(model, optimizer)["state"]["weight"]
            shown = {name: value.dtype for name, value in states.items()}
        except AssertionError as error:
            shown = f"AssertionError {error}"
        if rank == 0:
            print("originals" if originals else "flat", shown, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
