"""torch `FullyShardedDataParallel`: a cast that swaps tensors loses the flat parameter's attributes

With `torch.__future__.set_swap_module_params_on_conversion(True)`, `.double()` on the wrapper swaps the flat parameter for
a plain one, and the next forward raises AttributeError. Seen by TRAINING-5.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["TRAINING-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^AttributeError: .Parameter. object has no attribute ._unpadded_unsharded_size'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.__future__.set_swap_module_params_on_conversion(True)
    mesh, cpu = init_device_mesh("cpu", (world,)), torch.device("cpu")
    model = FSDP(nn.Linear(4, 4), device_mesh=mesh, device_id=cpu, use_orig_params=True).double()
    model(torch.randn(2, 4).double())  # 'Parameter' object has no attribute '_unpadded_unsharded_size'
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
