"""DeepSpeed ZeRO stage 3: a unit that runs twice under a re-entrant checkpoint stops backward, or has other gradients

The backward of each run puts the parameter into the bucket of gradients, where the second finds it: `AssertionError`. Where a
bucket holds one gradient it does not raise, and the gradients are others than those of a plain model. DeepSpeed 0.19.8, torch
2.13.0; torch's `fully_shard` loses the gradients of one run (F-326). Seen by RECOMPUTATION-5.
"""

# /// finding
# implementations = ["deepspeed.zero3"]
# requirements = ["RECOMPUTATION-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["deepspeed>=0.19.8"]
# shows = '^1 AssertionError'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def main(rank, world, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    model = Twice()
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)
    try:
        engine.backward(engine(torch.ones(1, 1, requires_grad=True)).sum())
    except AssertionError as error:
        print(rank, type(error).__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
