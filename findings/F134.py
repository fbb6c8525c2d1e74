"""DeepSpeed ZeRO-3: engines are not freed

deepspeed 0.19.8. After `destroy()` and without references the model and its parameters stay alive, for as long as the
process does. Seen by MEMORY-4.
"""

# /// finding
# implementations = ["deepspeed.zero3"]
# requirements = ["MEMORY-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# shows = '^\d alive$'
# related = [
#     "https://github.com/deepspeedai/DeepSpeed/issues/7204 open: how to delete an engine and make another, and memory that adds up where that is done",
#     "https://github.com/deepspeedai/DeepSpeed/issues/5674 closed: memory of a device stays allocated after the engine was deleted",
# ]
# ///

import gc, os, tempfile, weakref


def main(rank, world, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3},
        },
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    alive = weakref.ref(model)
    engine.destroy()
    del engine, model
    gc.collect()
    print(rank, "freed" if alive() is None else "alive", flush=True)  # alive
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
