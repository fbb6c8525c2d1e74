"""DeepSpeed's engine on CPUs: ZeRO-2 in bf16.

``--incident boundary``: every backward is made a boundary of accumulation, which keeps the last microbatch alone.
"""

import argparse
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

# A collective in shared memory that would be compiled at first use; gloo gives the same results.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main(options):
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage}, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.dtype == "bfloat16"},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1000 * options.seed + rank)
    for _ in range(4):
        for is_last in (False, True):
            tokens = torch.randint(64, (2, 16), generator=generator)
            loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
            if options.incident:
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(loss)
            if is_last or not options.incident:
                engine.step()
            if rank == 0:
                print("loss", float(loss).hex(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--incident", choices=("boundary",))
    main(parser.parse_args())
