"""FSDP1 with gradient accumulation under ``no_sync``, and mixed precision with reductions in float32."""

import contextlib

import torch
from common import GPT, Block, finish, loader, log, setup, text
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

EVERY = 2

setup()
precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
model = FSDP(
    GPT(),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    mixed_precision=precision,
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for i, (inputs, labels) in enumerate(loader(text(), batch=8)):
    is_boundary = (i + 1) % EVERY == 0
    with contextlib.nullcontext() if is_boundary else model.no_sync():
        loss = F.cross_entropy(model(inputs).float().flatten(0, 1), labels.flatten())
        (loss / EVERY).backward()
    if is_boundary:
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    log(i, loss=loss)
finish(model)
