"""DeepSpeed without ZeRO: `loss.backward()` is refused

deepspeed 0.19.8. Stages 1 to 3 take it as they take `engine.backward(loss)`; stage 0 raises in backward. Loud. Seen by
RECOMPUTATION-4, whose case calls backward of the loss under a re-entrant checkpoint. `python findings/F348.py 1` prints nothing.
"""

# /// finding
# implementations = ["deepspeed.zero0"]
# requirements = ["RECOMPUTATION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["0"]
# shows = '^Direct calls to tensor\.backward\(\) are not supported'
# ///

import os, sys, tempfile

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
import deepspeed, torch, torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(sys.argv[1])},
    },
)
try:
    engine(torch.ones(1, 4)).sum().backward()
except RuntimeError as error:
    print(error, flush=True)
dist.destroy_process_group()
