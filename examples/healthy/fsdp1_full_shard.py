"""FSDP1 as most scripts have it: an auto-wrap policy by the class of the block, FULL_SHARD, ``clip_grad_norm_``."""

import functools

import torch
from common import GPT, Block, finish, loader, log, setup, text
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional as F

setup()
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
model = FSDP(GPT(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

model.train()
for step, (inputs, labels) in enumerate(loader(text())):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    log(step, loss=loss)
finish(model)
