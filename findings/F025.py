"""torch `fully_shard`, `FullyShardedDataParallel`: a model whose first forward ran in inference mode cannot be trained

The memory of gathered parameters is made in the first forward. Made in inference mode it consists of inference tensors,
and the first training forward raises: `Inplace update to inference tensor outside InferenceMode is not allowed`, or
`The grad_fn is needed to access the AccumulateGrad`. Seen by EVALUATION-1.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp"]
# requirements = ["EVALUATION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# shows = '^Inplace update to inference tensor|^The `grad_fn` is needed'
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/113203 closed: `inference_mode` before training results in FSDP AssertionError, for `FullyShardedDataParallel`",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for wrap in (
        lambda m: fully_shard(m, mesh=mesh),
        lambda m: FullyShardedDataParallel(m, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True),
    ):
        model = wrap(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4)))
        with torch.inference_mode():
            model(torch.randn(2, 4))
        try:
            model(torch.randn(2, 4)).sum().backward()
            print("fine")
        except (RuntimeError, AssertionError) as error:
            print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
