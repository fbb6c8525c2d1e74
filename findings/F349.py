"""DeepSpeed without ZeRO: gradients in float64 are refused

deepspeed 0.19.8. Stage 0 takes parameters in float64, runs forward and backward, and then raises, because its reduction
has no bucket for them; no parameter is named. Stages 1 and 2 take them, stage 3 refuses them at once (F-161). Loud. Seen by DRAWN-1
and INIT-5. `python findings/F349.py 1` prints nothing.
"""

# /// finding
# implementations = ["deepspeed.zero0"]
# requirements = ["DRAWN-1", "INIT-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["0"]
# shows = '^attempting to reduce an unsupported grad type: torch\.float64'
# ///

import os, sys, tempfile

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
import deepspeed, torch, torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(4, 4).double()
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
loss = engine(torch.ones(1, 4).double()).sum()
try:
    engine.backward(loss)
except AssertionError as error:
    print(error, flush=True)
dist.destroy_process_group()
