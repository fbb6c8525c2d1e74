"""DeepSpeed ZeRO-3: float64 is refused

deepspeed 0.19.8. Parameters in float64, which stages 1 and 2 take, are refused with an assertion. Seen by DRAWN-1, whose models are
in float64. `python findings/F161.py 1` prints nothing.
"""

# /// finding
# implementations = ["deepspeed.zero3"]
# requirements = ["DRAWN-1"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["3"]
# shows = '^\d Invalid data type torch\.float64'
# ///

import os, sys, tempfile


def main(rank, world, stage, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Linear(4, 4).double()
    try:
        deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": stage},
            },
        )
    except AssertionError as error:
        print(rank, error, flush=True)  # stage 3: Invalid data type torch.float64
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, int(sys.argv[1]), tempfile.mktemp()), nprocs=2)
