"""DeepSpeed ZeRO-1 with `overlap_comm`: a parameter that the last microbatch does not use is not reduced

deepspeed 0.19.8. With `overlap_comm` stage 1 reduces a gradient in the hook of its parameter, and only in the backward of the last
microbatch. A parameter that an earlier microbatch alone uses, such as an expert or a branch, is updated with the gradient of the one rank
that owns its shard. Silent; stage 1 without `overlap_comm` and stage 2 are right. Seen by ACCUMULATION-7 and DETERMINISM-2
("this rank's own gradient, as when the reduction over the ranks is missing").
"""

# /// finding
# implementations = ["deepspeed.zero1_overlap"]
# requirements = ["ACCUMULATION-7", "DETERMINISM-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["deepspeed>=0.19.8"]
# related = [
#     "https://github.com/deepspeedai/DeepSpeed/pull/8184 merged: a review of another mode names the same gap, hooks before the boundary and a step that reduces nothing",
# ]
# shows = '^\d overlap_comm=True first -0\.5 '
# ///

import os, tempfile


def main(rank, world, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])

        def forward(self, x, branch):
            return x * self.branches[branch]

    for overlaps in (False, True):
        model = Branches()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": 1, "overlap_comm": overlaps},
            },
        )
        for microbatch in range(2):
            engine.backward(engine(torch.full((1, 1), rank + 1.0), microbatch).sum())
            engine.step()
        first, last = (value.item() for value in model.branches)  # each moves by the average, -0.75
        print(f"{rank} overlap_comm={overlaps} first {first} last {last}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
