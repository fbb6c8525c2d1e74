"""DeepSpeed ZeRO-1, ZeRO-2: of two backwards that reduce before one step, the first is lost

deepspeed 0.19.8. Where `gradient_accumulation_steps` is 1 or `set_gradient_accumulation_boundary(True)` was called, each
`engine.backward` reduces, and the reduced gradients replace those of the backward before. Silent; stages 0 and 3 add them up.
The documentation of the call allows one boundary before a step, that of `backward` says nothing; `coalesce_grad_reduction` and
`"managed_gradient_accumulation": false` are for several. Seen by ACCUMULATION-1 and ACCUMULATION-6. `python
findings/F350.py 0` prints 11.0 instead of 10.0.
"""

# /// finding
# implementations = ["deepspeed.zero1", "deepspeed.zero2"]
# requirements = ["ACCUMULATION-1", "ACCUMULATION-6"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["1"]
# shows = '^gradient 10\.0'
# ///

import os, sys, tempfile

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
import deepspeed, torch, torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(1, 1, bias=False)
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
for value in (1.0, 10.0):
    engine.backward(engine(torch.full((1, 1), value)).sum())
print("gradient", safe_get_full_grad(model.weight).item(), flush=True)  # 11.0 is right
dist.destroy_process_group()
