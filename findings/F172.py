"""torch `FullyShardedDataParallel`: what is loaded into an optimizer shares its numbers of steps

The state dict that `optim_state_dict_to_load` returns, and so the optimizer that loads it, has the very tensors of the
state dict that was given, where they have no dimension. The next step changes what was loaded, which then has old moments
and a new number of steps: loaded into a second model, or again, it is another state. torch 2.13.0. Seen by STATE-10. F-170
is the same of `get_state_dict`.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'tensor\(2\.\)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        saved = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    optimizer.step()
    print(rank, {name: state["step"] for name, state in saved["state"].items()})  # 2 for what the rank holds
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
