"""torch `FullyShardedDataParallel`: the versions of modules are saved under the names of wrappers

The values of a state dict have the unsharded names, and its `_metadata` those of the wrappers. Loaded into the unsharded
model, every module takes the state dict for one without a version: batch normalisation then does not miss
`num_batches_tracked`. torch 2.13.0. Seen by STATE-1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '._fsdp_wrapped_module\.0.: '
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Sequential(nn.BatchNorm1d(4)), device_id=torch.device("cpu"))
    state = model.state_dict()
    print(rank, list(state), dict(state._metadata))  # "0.weight", but "_fsdp_wrapped_module.0": {"version": 2}
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
