"""torch `FullyShardedDataParallel`: with `rank0_only`, a state that belongs to no parameter arrives as a private description

`optim_state_dict_to_load` sends the states of parameters from rank 0, and describes their tensors beforehand by shape and
dtype. A tensor that user code has put under another name is described, too, and is not sent: on the other ranks the load returns
the description, a `_PosDimTensorInfo`, in its place. Seen beside CALLS-7.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["CALLS-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-30"]
# shows = '^rank 1 loads: _PosDimTensorInfo'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FSDP(nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        state = FSDP.optim_state_dict(model, optimizer)
        if rank == 0:
            state["state"]["of user code"] = torch.ones(2)
        try:
            loaded = FSDP.optim_state_dict_to_load(model, optimizer, state)
            print(f"rank {rank} loads: {loaded['state']['of user code']}", flush=True)
        except RuntimeError as error:  # rank 0 sends it, and no other rank receives
            print(f"rank {rank}: RuntimeError: {str(error)[-100:]}", flush=True)


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
