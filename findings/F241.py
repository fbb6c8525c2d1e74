"""torch `FullyShardedDataParallel`: without a mesh, a rank without rows of a parameter cannot load the optimizer's state

Sharded state dicts then consist of ShardedTensors (F-97). When `torch.distributed.checkpoint` plans a load it leaves out
those of which a rank has no shard (`_flatten_sharded_tensors`), takes their names, which the checkpoint has, for missing
ones and the checkpoint for one of before torch 2.4, and looks for the names that the groups of the optimizer had then. So
does every rank that has no rows of some parameter, as of nine rows the last one of four, and the others raise with it, also
in the world that has saved. Without the optimizer's state, or with a mesh, the load is right. torch 2.13.0. Seen by
RECOVERY-2 with four ranks that load what two have saved. The reproducer prints that `optimizer.param_groups` is missing.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["RECOVERY-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d .*Missing key in checkpoint state_dict: optimizer\.param_groups'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Linear(9, 9), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=f"{path}-saved")
    try:
        checkpoint.load(state, checkpoint_id=f"{path}-saved")
    except BaseException as error:
        print(
            rank, str(error).strip().splitlines()[-1]
        )  # Missing key in checkpoint state_dict: optimizer.param_groups.
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
