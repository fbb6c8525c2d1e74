"""DeepSpeed: what cannot be sharded is not named

deepspeed 0.19.8, stages 0 to 3. The engine sends parameters as bytes, and raises without their names for one without dimensions or
with other strides (`python findings/F160.py 1`). Two dtypes are refused in the first forward, in stage 3 as in F-161, or in stage 0 as in F-349. Seen by INIT-5.
"""

# /// finding
# implementations = ["deepspeed.zero0", "deepspeed.zero1", "deepspeed.zero2", "deepspeed.zero3"]
# requirements = ["INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["1"]
# shows = '^\d self\.(dim\(\) cannot be 0|stride\(-1\) must be 1)'
# ///

import os, sys, tempfile


def main(rank, world, stage, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    options = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    for odd in (torch.ones(()), torch.ones(3, 2).t()):
        model = torch.nn.Linear(4, 4)
        model.odd = torch.nn.Parameter(odd)
        try:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
        except RuntimeError as error:
            print(rank, error, flush=True)  # self.dim() cannot be 0 ...; self.stride(-1) must be 1 ...
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, int(sys.argv[1]), tempfile.mktemp()), nprocs=2)
