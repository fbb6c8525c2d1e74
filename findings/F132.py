"""DeepSpeed: an engine that is stepped at the boundary alone trains with other gradients

deepspeed 0.19.8, stages 0 to 3. The engine counts microbatches by its calls of `step()`. A script that calls it after the last microbatch
alone, as with other optimizers, gets no error: the first microbatches of a step are counted as none, and the update comes a
step late or with a part of the gradients. The adapters call it after each; `tests/harness/test_naive_adapters.py` does not,
and ACCUMULATION-1 sees it. The reproducer prints the largest difference: 0.010 for stages 0 and 3, 0.047 for 1 and 2.
"""

# /// finding
# implementations = ["deepspeed.zero1", "deepspeed.zero2", "deepspeed.zero3"]
# requirements = ["ACCUMULATION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["1"]
# shows = '^0\.0*[1-9]'
# unlisted = "the adapters call step() after each microbatch; tests/harness/test_naive_adapters.py does not, and sees it"
# ///

import os, sys, tempfile


def main(rank, world, stage, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def trained(steps_each):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": stage},
            },
        )
        for step in range(2):
            for microbatch in range(2):
                seed = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
                engine.backward(engine(torch.randn(2, 4, generator=seed)).square().mean())
                if steps_each or microbatch == 1:
                    engine.step()
        with deepspeed.zero.GatheredParameters([model.weight], enabled=stage == 3):
            return model.weight.detach().clone()

    difference = (trained(True) - trained(False)).abs().max().item()
    if rank == 0:
        print(difference, flush=True)  # 0 if it made none
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, int(sys.argv[1]), tempfile.mktemp()), nprocs=2)
