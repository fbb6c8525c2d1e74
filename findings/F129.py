"""DeepSpeed ZeRO-1, ZeRO-2: a parameter that was frozen when the engine was made stays so, with a gradient

deepspeed 0.19.8. The engine has no place for a parameter that did not require a gradient when it was made. Thawed later, it has this
rank's own gradient, which is neither reduced nor applied. Silent; stage 3 takes it in. Seen by FROZEN-2 ("it equals this
rank's own gradient, as when the reduction over the ranks is missing").
"""

# /// finding
# implementations = ["deepspeed.zero1", "deepspeed.zero2"]
# requirements = ["FROZEN-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["1"]
# shows = '^\d True$'
# ///

import os, sys, tempfile


def main(rank, world, stage, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage},
        },
    )
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    engine.backward(engine(torch.full((1, 2), rank + 1.0)).sum())
    print(rank, model[0].weight.grad, flush=True)  # this rank's own: twice as much on rank 1
    engine.step()
    print(rank, torch.equal(model[0].weight, before), flush=True)  # True
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, int(sys.argv[1]), tempfile.mktemp()), nprocs=2)
