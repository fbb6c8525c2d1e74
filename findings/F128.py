"""DeepSpeed ZeRO-1, ZeRO-2: gradients are all-reduced by default

deepspeed 0.19.8. With `reduce_scatter`, which is the default, `use_multi_rank_bucket_allreduce` is too: whole buckets are all-reduced,
and each rank keeps its part. With the all-gather of the parameters a step moves one and a half times the bytes that it needs.
Seen by COLLECTIVES-8. `python findings/F128.py 1` and `python findings/F128.py 2` print an all-reduce.
"""

# /// finding
# implementations = ["deepspeed.zero1", "deepspeed.zero2"]
# requirements = ["COLLECTIVES-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["1"]
# shows = 'c10d::allreduce_'
# ///

import os, sys, tempfile


def main(rank, world, stage, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Linear(4, 4, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "reduce_scatter": True},
        },
    )
    with torch.profiler.profile(record_shapes=True) as seen:
        engine.backward(engine(torch.ones(1, 4)).sum())
    if rank == 0:
        print([(one.name, one.input_shapes) for one in seen.events() if one.name.startswith("c10d::")], flush=True)
        # [('c10d::allreduce_', ...)] of all 16 elements
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, int(sys.argv[1]), tempfile.mktemp()), nprocs=2)
