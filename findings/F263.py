"""torch `FullyShardedDataParallel`: a cast moves ignored parameters before the others

With `use_orig_params=True` a conversion such as `double()` takes the parameters out of their modules and puts them back,
behind those that are ignored. Optimizers that are made after it number them otherwise than one of an unsharded model.
torch 2.13.0. Seen by CALLS-10.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d \[.bias., .weight.\]$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    layer = nn.Linear(2, 2)
    model = FSDP(layer, device_id=torch.device("cpu"), use_orig_params=True, ignored_states=[layer.bias])
    model.double()
    print(rank, [name for name, _ in layer.named_parameters()])  # ['bias', 'weight']
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
