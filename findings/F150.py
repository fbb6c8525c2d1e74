"""DeepSpeed ZeRO-3: in the first step parameters are freed after forward, whatever `stage3_max_reuse_distance` is

deepspeed 0.19.8. A parameter that is used again within that many elements, a billion by default, is documented not to be
released. Which are, the engine takes from the order that it recorded in the first forward and backward. There, and after
each change of the order, every module frees its parameters after forward, and backward gathers them again. Seen by COLLECTIVES-8 ("step 0 moved
68664 bytes; with 22848 bytes of parameters at most 47188 are needed"); the second step is right.
"""

# /// finding
# implementations = ["deepspeed.zero3"]
# requirements = ["COLLECTIVES-8"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# shows = '^0 6$'
# ///

import collections, os, tempfile


def main(rank, world, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_reuse_distance": 10**9,
                "stage3_max_live_parameters": 10**9,
            },
        },
    )
    for step in range(3):
        with torch.profiler.profile() as seen:
            engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        kinds = collections.Counter(one.name for one in seen.events() if one.name.startswith("c10d::"))
        if rank == 0:
            print(step, kinds["c10d::_allgather_base_"], flush=True)  # 6 in the first step, 3 in the others
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
