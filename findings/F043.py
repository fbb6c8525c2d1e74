"""torch `FullyShardedDataParallel`: the error for a value of another size has the names of wrappers

Missing and unknown names are cleaned, misfit ones are not. torch 2.13.0. Seen by STATE-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = 'size mismatch for _fsdp_wrapped_module\.bias'
# related = [
#     "https://github.com/pytorch/pytorch/issues/117446 closed: the same of missing and unknown names, which are clean since",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    try:
        model.load_state_dict({**model.state_dict(), "bias": torch.zeros(5)})
    except RuntimeError as error:
        print(rank, error)  # size mismatch for _fsdp_wrapped_module.bias
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
