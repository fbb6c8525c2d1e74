"""Lightning Fabric `clip_gradients` with FSDP1: `error_if_nonfinite` is ignored

lightning-fabric 2.6.6, `FSDPStrategy.clip_gradients_norm`. The argument, True by default, is not passed on: torch's
`FullyShardedDataParallel.clip_grad_norm_` has no such argument. The norm is NaN, every gradient becomes NaN, and training
goes on. Silent. Seen by CLIPPING-9 and INIT-11, on a CPU with Fabric's own refusal of CPUs left out as below: it refuses
the class and not its subclasses.
"""

# /// finding
# implementations = ["lightning.fabric_fsdp1"]
# requirements = ["CLIPPING-9", "INIT-11"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["lightning-fabric>=2.6.6"]
# shows = '^\d norm nan, gradients nan$'
# upstream = [
#     "https://github.com/Lightning-AI/pytorch-lightning/issues/21928",
# ]
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank, world, path):
    os.environ["LOCAL_RANK"] = str(rank)
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import FSDPStrategy

    class OnCpu(FSDPStrategy):
        pass

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=OnCpu(), plugins=[LightningEnvironment()])
    fabric.launch()
    mesh, device = init_device_mesh("cpu", (world,)), torch.device("cpu")
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_mesh=mesh, device_id=device, use_orig_params=True)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4)).sum() * torch.nan)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=True)  # does not raise
    gradients = [parameter.grad.sum().item() for parameter in model.parameters() if parameter.grad is not None]
    print(rank, f"norm {norm}, gradients {sum(gradients)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
