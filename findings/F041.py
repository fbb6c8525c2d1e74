"""torch `FullyShardedDataParallel`: what goes to the CPU where it is already is freed

With `offload_to_cpu=True` a model that computes on the CPU frees the whole parameters before they are read
(`FlatParamHandle.to_cpu` frees the memory that it has just "moved"): `state_dict` and `summon_full_params` raise, or the
process ends with a segmentation fault. torch 2.13.0. The adapters therefore offload no state dict on the CPU, and
`torch.fsdp` lacks `whole-on-cpu`. `tests/harness/test_offloading_on_the_cpu.py` does both and sees STATE-2 and
EVALUATION-4 fail.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["STATE-2", "EVALUATION-4"]
# fixed_in = "2.14"
# reproduces = ["torch 2.13.0 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.14.1 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d setStorage: .* out of bounds for storage of size 0|^torch\.\S+: process \d terminated with signal SIGSEGV'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/188989 closed: summon_full_params(offload_to_cpu=True) fails with CPU-offloaded FSDP model",
#     "https://github.com/pytorch/pytorch/pull/188990 closed: its fix, Fix to_cpu when flat_param is already on CPU",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    config = FullStateDictConfig(offload_to_cpu=True)
    try:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            print(rank, model.state_dict())
    except RuntimeError as error:
        print(rank, error)  # setStorage: ... out of bounds for storage of size 0, or a segmentation fault
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
