"""DeepSpeed ZeRO-3: a dict that user code passes to a module contains other tensors afterwards

Before and after each module's forward, hooks apply a function to every tensor of its inputs and outputs, and write the
results into the dict itself; lists and tuples are made anew. A script that uses the dict again backpropagates through
the module's hook, and one that compares finds other objects. deepspeed 0.19.8. Silent. Seen by AUTOGRAD-16.
"""

# /// finding
# implementations = ["deepspeed.zero3"]
# requirements = ["AUTOGRAD-16"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# shows = '^\d False$'
# related = [
#     "https://github.com/deepspeedai/DeepSpeed/issues/5524 open: how these hooks put functions on the tensors that a module takes and returns",
# ]
# ///

import os, tempfile


def main(rank, world, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Sum(torch.nn.Linear):
        def forward(self, given):
            return super().forward(given["x"])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unit = Sum(4, 4)

        def forward(self, x):
            given = {"x": x * 2}
            before = given["x"]
            output = self.unit(given)
            print(rank, given["x"] is before, flush=True)  # False
            return output

    engine, *_ = deepspeed.initialize(
        model=(model := Model()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3},
        },
    )
    engine(torch.ones(1, 4, requires_grad=True))


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
