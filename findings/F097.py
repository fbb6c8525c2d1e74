"""torch `FullyShardedDataParallel`: with process groups, sharded state dicts consist of ShardedTensors

Without a mesh, a sharded state dict has values of a class that torch itself warns of as deprecated and whose `numel`
raises; nothing tells a script that it needs a mesh. torch 2.13.0. Seen by STATE-1.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d ShardedTensor torch function .numel.'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/119802 open: FSDP checkpoint saving raises internal deprecation warnings",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Linear(2, 2), process_group=dist.group.WORLD, device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        weight = model.state_dict()["weight"]
    try:
        weight.numel()
    except RuntimeError as error:
        print(rank, type(weight).__name__, error)  # ShardedTensor torch function 'numel', ... not supported
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
